"""Cutting along the batch, and joining again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.backend.layout import batch_layout, join_batch, legal_parts, split_batch
from hetpass.ir.kinds import Batched, Partial, Position, Whole


@given(
    before=st.lists(st.integers(1, 3), max_size=2),
    after=st.lists(st.integers(1, 3), max_size=2),
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    parts=st.integers(1, 4),
    part=st.integers(1, 3),
)
def test_part_p_holds_examples_p(before, after, outer, inner, parts, part):
    batch, dim = parts * part, len(before)
    value = np.arange(np.prod([*before, outer * batch * inner, *after], dtype=int))
    open_shape = (*before, outer, batch, inner, *after)
    cut = split_batch(value.reshape(*before, -1, *after), dim, outer, parts)
    for p in range(parts):
        examples = np.arange(p * part, (p + 1) * part)
        wanted = np.take(value.reshape(open_shape), examples, axis=dim + 1)
        np.testing.assert_array_equal(cut[p], wanted.reshape(*before, -1, *after))
    np.testing.assert_array_equal(join_batch(cut, dim, outer), value.reshape(*before, -1, *after))


def test_layouts_of_kinds():
    assert batch_layout(Batched(2, 3)) == (2, 3)
    assert batch_layout(Batched(1, None)) == (1, 1)
    assert batch_layout(Position(0, 5)) == (0, 1)
    assert batch_layout(Whole()) is None
    assert batch_layout(Partial()) is None


@pytest.mark.parametrize(
    ("batch", "near", "legal"), [(12, 5, (3, 4, 6, 12)), (7, 2, (1, 7)), (8, 8, (4, 8))]
)
def test_legal_parts(batch, near, legal):
    assert legal_parts(batch, near) == legal
