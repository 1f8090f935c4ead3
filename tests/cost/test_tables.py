from __future__ import annotations

import numpy as np
import pytest

from hetpass.cost.analytic import PEAK, Submesh
from hetpass.cost.tables import arrival_tables, stage_table
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.facts import ProgramFacts

KIND = DeviceKind("k", {"float32": 1.0}, 1e9, 1e18)
GROUP = DeviceGroup("g", KIND, 1, 4, Link(0.0, 10.0))


def facts():
    record = {
        "seconds": {"k": (1.0, 2.0)},
        "boundary_bytes": 40.0,
        "gradient_boundary_bytes": 20.0,
        "most_tensor_parallel": 4,
    }
    return ProgramFacts.synthetic(3 * [record], 8)


def test_what_came_over_the_link_is_gathered_by_a_row():
    """Four devices want all of it: each of three steps hands on a quarter."""
    there, back = arrival_tables(facts(), GROUP, Submesh(1, 4), 2)
    assert there == pytest.approx([0.0, 3 * 20 / 10, 3 * 20 / 10])
    assert back == pytest.approx([0.0, 3 * 10 / 10, 3 * 10 / 10, 0.0])
    for alone in (Submesh(1), Submesh(2)):
        assert not np.concatenate(arrival_tables(facts(), GROUP, alone, 2)).any()


def test_stages_pay_for_what_arrives_at_their_ends():
    machines = Cluster((GROUP,))
    table = stage_table(facts(), machines, 0, Submesh(1, 4), 4, "none", PEAK)
    layer_s = 2 / 4
    assert table.forward_s[0, 3] == pytest.approx(3 * layer_s)  # nothing arrives
    assert table.forward_s[1, 3] == pytest.approx(2 * layer_s + 6.0)
    assert table.backward_s[0, 2] == pytest.approx(4 * layer_s + 3.0)
    assert table.backward_s[1, 3] == pytest.approx(4 * layer_s)
