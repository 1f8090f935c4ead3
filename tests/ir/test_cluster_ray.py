"""Groups out of Ray's list of nodes."""

from __future__ import annotations

import pytest

from hetpass.errors import ClusterError
from hetpass.ir.cluster_ray import (
    KIND_OF_ACCELERATOR,
    accelerator_of_kind,
    accelerators_of,
    groups_of_nodes,
)


def node(alive=True):
    return {"Alive": alive, "Resources": {"CPU": 8.0}}


def gpus(accelerator, count, alive=True):
    resources = {"CPU": 8.0, "GPU": float(count), f"accelerator_type:{accelerator}": 1.0}
    return {"Alive": alive, "Resources": resources}


def test_nodes_of_a_kind_and_size_are_a_group():
    nodes = [gpus("A100", 4), gpus("V100", 8), gpus("A100", 4), gpus("A100", 2)]
    found = groups_of_nodes(nodes)
    assert [(g.name, g.kind.name, g.hosts, g.devices_per_host) for g in found] == [
        ("A100", "A100-40", 2, 4),
        ("V100", "V100-16", 1, 8),
        ("A100-2", "A100-40", 1, 2),
    ]
    assert found[0].inter_host is not None


def test_nodes_without_accelerators_are_left_out():
    found = groups_of_nodes([node(), gpus("T4", 1), node()])
    assert [g.name for g in found] == ["T4"]


def test_a_cluster_of_cpus():
    (group,) = groups_of_nodes([node(), node(), node(alive=False)])
    assert (group.kind.name, group.hosts, group.devices_per_host) == ("cpu", 2, 1)


def test_dead_nodes_do_not_count():
    with pytest.raises(ClusterError, match="HP-CLUSTER-DEVICES"):
        groups_of_nodes([gpus("T4", 1, alive=False)])


def test_unknown_accelerators_are_refused():
    with pytest.raises(ClusterError, match="HP-CLUSTER-KIND"):
        groups_of_nodes([gpus("Gaudi", 8)])


def test_the_exact_name_is_taken():
    resources = {"GPU": 8.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    assert accelerators_of(resources) == ("A100-80G", 8)


def test_kinds_are_found_again():
    nodes = [gpus("V100", 8), gpus("A100-80G", 4)]
    assert accelerator_of_kind("A100-80", nodes) == "A100-80G"
    assert accelerator_of_kind("V100-16", nodes) == "V100"
    assert accelerator_of_kind("H100-80", nodes) is None


@pytest.mark.parametrize("kind", sorted(set(KIND_OF_ACCELERATOR.values())))
def test_the_table_names_kinds_of_the_catalogue(kind):
    from hetpass.ir.catalogue import find_kind

    assert find_kind(kind).name == kind
