from __future__ import annotations

import math

import numpy as np
import pytest

from hetpass.planner.banded_program import BandedProgram
from hetpass.planner.flat_program import flat_program
from hetpass.planner.inter_op import InterOpOptions, suffix_program
from hetpass.planner.objective import Deltas, fits, priced
from hetpass.planner.reach import Reach
from tests.planner.inter_op_instances import random_tables


def both(tables, options, bound_s):
    """The shortest fill by the whole program and on bands (infinite where there is none), and
    whether the relaxation ruled it out."""
    program = suffix_program(tables, options)
    whole = program.solve(bound_s)
    flat = flat_program(tables, program.choices, program.graph, options.allowed)
    bands = Reach(flat, program.levels()).bands(bound_s)
    paths = [] if bands is None else BandedProgram(flat, bands, bound_s, program.levels()).picks(3)
    found = [priced(tables, picks, bound_s, options.allowed) for picks in paths]
    for one in found:
        assert one.load_s <= bound_s * (1 + 1e-9)
        assert fits(tables, one)
    fills = [one.fill_s for one in found]
    assert fills == sorted(fills)
    assert len({p.picks[0].table for p in found}) == len(found)
    expected = math.inf if whole is None else priced(tables, whole, bound_s, options.allowed).fill_s
    return expected, fills[0] if fills else math.inf, bands is None


@pytest.mark.parametrize("one_run", [False, True])
@pytest.mark.parametrize("allowed", [Deltas(), Deltas(1, 1), Deltas(2, 2), Deltas(1, 2)])
def test_the_answer_of_the_whole_program(one_run, allowed):
    impossible = ruled_out = 0
    options = InterOpOptions(one_run=one_run, allowed=allowed)
    for seed in range(40):
        chance = np.random.default_rng(seed)
        tables = random_tables(chance)
        scale_s = 0.3 * tables.num_microbatches * tables.num_layers
        for bound_s in (math.inf, *(scale_s * chance.uniform(0.2, 4, 4))):
            expected, found, none = both(tables, options, bound_s)
            assert found == pytest.approx(expected, rel=1e-9), f"seed {seed}, bound {bound_s}"
            impossible += math.isinf(expected)
            ruled_out += none
    assert 0.7 * impossible < ruled_out <= impossible, (ruled_out, impossible)


def test_a_fill_that_nothing_is_below_and_a_load():
    for seed in range(60):
        tables = random_tables(np.random.default_rng(seed))
        options = InterOpOptions(one_run=False)
        program = suffix_program(tables, options)
        flat = flat_program(tables, program.choices, program.graph, options.allowed)
        reach = Reach(flat, program.levels())
        picks = program.solve(math.inf)
        if picks is None or not reach.possible(math.inf):
            assert picks is None
            continue
        assert reach.least_fill_s() <= priced(tables, picks).fill_s * (1 + 1e-12)
        low_s, high_s = reach.lowest_load_s((0.0, math.inf), 0.01)
        assert low_s <= high_s
        if low_s > 0:
            assert program.solve(low_s) is None
        assert reach.possible(high_s)
