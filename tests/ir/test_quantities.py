from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.ir.quantities import counted, quantity, spelled


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("10 us", "time", 10e-6),
        ("10us", "time", 1e-5),
        ("0.2 ms", "time", 2e-4),
        ("3 ns", "time", 3e-9),
        ("1.5e2 µs", "time", 1.5e-4),
        ("2 s", "time", 2.0),
        ("40 GiB", "bytes", 40 * 2**30),
        ("16 GB", "bytes", 16e9),
        ("512 B", "bytes", 512.0),
        ("25 GB/s", "bandwidth", 25e9),
        ("5 Gbps", "bandwidth", 0.625e9),
        ("100 Mbit/s", "bandwidth", 12.5e6),
        ("1 GiB/s", "bandwidth", 2.0**30),
        ("312 TFLOP/s", "flops", 312e12),
        ("130 TOP/s", "flops", 130e12),
    ],
)
def test_values(text, dimension, value):
    assert quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("", "time"),
        ("us", "time"),
        ("10", "time"),
        ("10 GB/s", "time"),
        ("1e999 s", "time"),
        ("ten us", "time"),
        ("10 us us", "time"),
        ("0x10 B", "bytes"),
        ("nan B", "bytes"),
        ("1 " + "B" * 200, "bytes"),
        ("25 GB", "bandwidth"),
        ("1_000 B", "bytes"),
    ],
)
def test_refused(text, dimension):
    with pytest.raises(ValueError, match=r"."):
        quantity(text, dimension)


def test_bits_and_bytes_are_never_confused():
    with pytest.raises(ValueError, match="did you mean"):
        quantity("5 gbps", "bandwidth")


@given(st.floats(min_value=1e-9, max_value=1e17))
def test_spelled_reads_back_to_three_digits(value):
    for dimension in ("time", "bytes", "bandwidth", "flops"):
        assert quantity(spelled(value, dimension), dimension) == pytest.approx(value, rel=0.006)


def test_memory_is_spelled_in_powers_of_1024():
    assert spelled(16 * 2**30, "bytes") == "16 GiB"
    assert spelled(1e9, "bytes") == "954 MiB"
    assert spelled(17_179_869_185, "bytes", 4) == "16 GiB"
    assert spelled(17.5 * 2**30, "bytes", 4) == "17.5 GiB"
    assert spelled(1001.26 * 2**20, "bytes", 4) == "1001 MiB"
    assert spelled(999.4 * 2**20, "bytes", 4) == "999.4 MiB"


def test_one_and_several():
    assert [counted(n, "stage") for n in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(n, "microbatch") for n in (1, 4)] == ["1 microbatch", "4 microbatches"]
    assert [counted(n, "mesh") for n in (1, 8)] == ["1 mesh", "8 meshes"]
    assert [counted(n, "leaf", "leaves") for n in (1, 3)] == ["1 leaf", "3 leaves"]
