"""Numbers (lines A1 to A9b): every step of the zoo equals `jax.jit`, or is refused by name.

By default each step runs in two of the twelve layouts (M in 1, 2, 4, 8; one, two, three unequal
groups): M = 4 over two groups, and one more drawn by its name. `--all-plans` runs all twelve.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

from tests.equality import TOLERANCE, chosen_layouts, relative_error
from tests.programs.check import check
from tests.programs.everything import NUMBERS
from tests.programs.program import Program
from tests.programs.statistics import per_microbatch_programs


@pytest.fixture
def precise(request: pytest.FixtureRequest) -> None:
    """64-bit types where the program wants them."""
    if request.getfixturevalue("zoo_program").x64:
        request.getfixturevalue("x64")


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("zoo_program", NUMBERS, ids=str)
def test_equals_jit_or_is_refused_by_name(zoo_program: Program, all_plans: bool) -> None:
    check(zoo_program, chosen_layouts(str(zoo_program), all_plans))


@pytest.mark.parametrize("index", range(4))
def test_per_microbatch_meaning_equals_the_mean_over_slices(index: int, all_plans: bool) -> None:
    wanted = per_microbatch_programs()[index]
    check(wanted, chosen_layouts(str(wanted), all_plans))


NAIVE = tuple(p for p in NUMBERS if p.naive is not None)


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("zoo_program", NAIVE, ids=str)
def test_naive_answer_is_told_apart(zoo_program: Program) -> None:
    """The tests would shout: a careless pipeline's answer is far outside the tolerance."""
    assert zoo_program.naive is not None
    run = zoo_program.make()
    expected = run.jitted()(*run.args, **run.kwargs)
    naive = zoo_program.naive(zoo_program.make(), 4)
    loudest = max(
        relative_error(a, e)
        for a, e in zip(jax.tree.leaves(naive), jax.tree.leaves(expected), strict=True)
        if _is_inexact(e)
    )
    tolerance = zoo_program.tolerance or TOLERANCE[zoo_program.precision]
    assert loudest >= zoo_program.shouts >= 3 * tolerance


def _is_inexact(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact))
