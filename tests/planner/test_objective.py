"""T by closed forms: two stages of 2 s and 3 s, a link of 0.5 s there and 1 s back, M = 5."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hetpass.cost.tables import CostTables, GroupRoom, StageTable
from hetpass.planner.objective import (
    Pick,
    cheapest,
    fits,
    most_in_flight,
    needed_deltas,
    priced,
)

M = 5


def stage(group, forward, backward, once, fixed=1.0, activation=1.0):
    def table(value):
        return np.array([[np.inf, value, 2 * value], [np.inf, np.inf, value]])

    numbers = (forward, backward, once, fixed, activation)
    return StageTable(group, 1, (("data", 1),), "none", *map(table, numbers))


def tables(memory=100.0, latency=0.0, once=(0.0, 0.0)):
    return CostTables(
        2,
        M,
        (GroupRoom("a", 1, memory), GroupRoom("b", 1, memory)),
        (stage(0, 0.5, 1.5, once[0]), stage(1, 1.0, 2.0, once[1])),
        np.full((2, 2, 3), 0.5),
        np.full((2, 2, 3), 1.0),
        np.full((2, 2), latency),
    )


PICKS = (Pick(0, 0, 1), Pick(1, 1, 2))


def test_fill_is_one_microbatch_there_and_back():
    assert priced(tables(), PICKS).fill_s == 2 + 3 + 1.5
    assert priced(tables(latency=0.25), PICKS).fill_s == 2 + 3 + 1.5 + 0.5


def test_load_is_that_of_the_slowest_part():
    enough = priced(tables(), PICKS, 4 * 3.0)
    assert enough.in_flight == (3, 1)  # (3 + 1.5) / 3 rounded up is 2
    assert enough.load_s == 4 * 3.0
    one = priced(tables(), PICKS)
    assert one.in_flight == (2, 1)
    assert one.load_s == 4 * (3 + 1.5)


def test_sync_and_update_count_where_they_bind():
    assert priced(tables(once=(0.0, 7.0)), PICKS, 4 * 3.0 + 7).load_s == 4 * 3 + 7
    assert priced(tables(once=(20.0, 7.0)), PICKS, 28.0).load_s == 4 * 2 + 20
    assert priced(tables(once=(3.0, 0.0)), PICKS, 12.0).load_s == 12.0


def test_a_stage_that_holds_all_never_waits():
    all_held = priced(tables(), PICKS, 4 * 1.2)  # a bound that nothing meets
    assert all_held.in_flight == (5, 1)
    assert all_held.load_s == 4 * 3.0


def test_the_cheapest_counts_that_fit():
    assert cheapest(tables(), PICKS).in_flight == (3, 1)
    tight = cheapest(tables(memory=3.0), PICKS)
    assert tight.in_flight == (2, 1)
    assert tight.step_s == pytest.approx(6.5 + 18.0)
    assert cheapest(tables(memory=2.5), PICKS) is None


def test_what_fits():
    assert most_in_flight(tables().stages[0], 3.5, M)[0].tolist() == [0, 2, 0]
    assert most_in_flight(tables().stages[0], 100.0, M)[0].tolist() == [0, M, M]
    free = replace(tables().stages[0], activation_bytes=np.zeros((2, 3)))
    assert most_in_flight(free, 1.0, M)[0].tolist() == [0, M, 0]
    assert fits(tables(memory=4.0), priced(tables(), PICKS, 12.0))
    assert not fits(tables(memory=3.9), priced(tables(), PICKS, 12.0))


def test_deltas():
    assert needed_deltas(np.array([2.9, 3.0, 3.1, 6.1, 99.0]), 12.0, M).tolist() == [1, 1, 2, 3, 5]
    assert needed_deltas(4.0, math.inf, M) == 1
    assert needed_deltas(4.0, 0.0, 1) == 1
    assert needed_deltas(4.0, 0.0, M) == M
