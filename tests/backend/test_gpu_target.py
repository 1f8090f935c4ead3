from __future__ import annotations

import pytest

from hetpass.backend.gpu_target import gpu_target, gpu_targets
from hetpass.errors import ClusterError
from hetpass.ir.catalogue import find_kind


@pytest.mark.parametrize("name", sorted(gpu_targets()))
def test_every_target_is_of_a_kind_in_the_catalogue(name):
    kind = find_kind(name)
    text = gpu_target(kind)
    assert f"device_memory_size: {kind.memory_bytes}" in text
    assert f"memory_bandwidth: {int(kind.memory_bandwidth)}" in text
    figures = gpu_targets()[name]
    # a float32 product does two operations on every lane in every cycle
    peak = 2 * figures["cores"] * figures["lanes"] * figures["clock"] * 1e9
    assert peak == pytest.approx(kind.peak_flops["float32"], rel=0.04)


def test_capability_and_shared_memory_are_written_as_xla_reads_them():
    text = gpu_target(find_kind("A100-40"))
    assert "cuda_compute_capability { major: 8 minor: 0 }" in text
    assert f"shared_memory_per_block_optin: {163 * 1024}" in text
    assert text.count("{") == text.count("}")


def test_a_kind_without_figures_is_refused():
    with pytest.raises(ClusterError) as caught:
        gpu_target(find_kind("cpu"))
    assert caught.value.code == "HP-TARGET-KIND"
