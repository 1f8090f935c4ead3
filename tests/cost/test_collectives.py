from __future__ import annotations

import pytest

from hetpass.cost.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    permute_s,
    reduce_scatter_s,
)
from hetpass.ir.devices import Link

LINK = Link(1e-3, 100.0)


def test_closed_forms_of_four_devices():
    """800 bytes: steps of 200 bytes take 1 ms + 2 s."""
    step_s = 1e-3 + 2.0
    assert all_gather_s(800, 4, LINK) == pytest.approx(3 * step_s)
    assert reduce_scatter_s(800, 4, LINK) == pytest.approx(3 * step_s)
    assert all_reduce_s(800, 4, LINK) == pytest.approx(6 * step_s)
    assert all_to_all_s(800, 4, LINK) == pytest.approx(3 * (1e-3 + 0.5))


@pytest.mark.parametrize("collective", [all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s])
def test_one_device_or_nothing_is_free_and_a_link_is_needed(collective):
    assert collective(800, 1, None) == 0
    assert collective(0, 4, LINK) == 0
    with pytest.raises(ValueError, match="link"):
        collective(800, 4, None)


def test_a_permutation_is_one_message():
    assert permute_s(800, LINK) == pytest.approx(1e-3 + 8.0)
    assert permute_s(0, None) == 0
    with pytest.raises(ValueError, match="link"):
        permute_s(1, None)
