"""A seeded sample of random programs and plans; all of them: `python -m tests.fuzz`."""

from __future__ import annotations

import collections

import pytest

from tests.fuzz.builder import PIECES
from tests.fuzz.case import SHARES, kind_of, make_case
from tests.fuzz.check import check, frontend, whole

FIRST = 100_000  # beyond the seeds of the stored log


def test_shares_are_as_published() -> None:
    counts = collections.Counter(kind_of(seed) for seed in range(FIRST, FIRST + 200))
    assert sum(SHARES.values()) == 100
    assert counts == {kind: 2 * share for kind, share in SHARES.items()}
    made_of = {kind for slots in PIECES.values() for kind in slots}
    assert set(SHARES) - made_of == {"precision"}  # a property of the whole program
    assert made_of - set(SHARES) == {"plain"}


def test_a_seed_is_a_program() -> None:
    one, two = make_case(FIRST + 3), make_case(FIRST + 3)
    assert str(one) == str(two)
    assert all((one.batch[k] == two.batch[k]).all() for k in one.batch)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 40))
def test_the_frontends_program(seed: int) -> None:
    case = make_case(seed)
    outcome = check(case, frontend)
    assert outcome.verdict in ("equal", "refused"), f"{case}\n{outcome.text}"


@pytest.mark.parametrize("seed", range(FIRST + 50, FIRST + 58))
def test_the_whole_pipeline(seed: int) -> None:
    case = make_case(seed)
    outcome = check(case, whole)
    assert outcome.verdict in ("equal", "refused"), f"{case}\n{outcome.text}"
