"""Programs (lines B10 to B12): frameworks, operations, dataflow and signatures equal `jax.jit`.

Layouts as in test_cases_numbers.py.
"""

from __future__ import annotations

import pytest

from tests.equality import chosen_layouts
from tests.programs.check import check
from tests.programs.everything import PROGRAMS
from tests.programs.program import Program


@pytest.mark.parametrize("zoo_program", PROGRAMS, ids=str)
def test_equals_jit_or_is_refused_by_name(zoo_program: Program, all_plans: bool) -> None:
    check(zoo_program, chosen_layouts(str(zoo_program), all_plans))
