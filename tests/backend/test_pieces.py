"""Pieces cover every target shard, from balanced sources."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetpass.backend.pieces import Piece, assemblies, elements, intersection, relative


def grid(shape, cuts, copies, first_device):
    """Devices of a grid of equal boxes, `copies` devices per box."""
    spans = [
        [(n // c * i, n // c * (i + 1)) for i in range(c)] for n, c in zip(shape, cuts, strict=True)
    ]
    boxes = [tuple(box) for box in _product(spans)]
    return {first_device + i: box for i, box in enumerate(boxes * copies)}


def _product(spans):
    if not spans:
        return [()]
    return [(span, *rest) for span in spans[0] for rest in _product(spans[1:])]


cuts = st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4]))


@given(cuts, cuts, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 2, 100]))
def test_every_shard_is_filled_once(source_cuts, target_cuts, copies, more, first):
    shape = (12, 24)
    value = np.arange(12 * 24).reshape(shape)
    sources = grid(shape, source_cuts, copies, 0)
    targets = grid(shape, target_cuts, more, first)
    steps = assemblies(sources, targets)
    assert sorted(step.device for step in steps) == sorted(targets)
    made = {}
    for step in steps:
        shard = np.full(tuple(b - a for a, b in step.box), -1)
        for piece in step.pieces:
            inside = tuple(slice(*span) for span in relative(piece.box, step.box))
            assert (shard[inside] == -1).all()
            shard[inside] = value[tuple(slice(*span) for span in piece.box)]
            assert intersection(piece.box, sources[piece.source]) == piece.box
        if step.copy_of is not None:
            assert not step.pieces
            shard = made[step.copy_of]  # it was made before
        made[step.device] = shard
        wanted = value[tuple(slice(*span) for span in targets[step.device])]
        np.testing.assert_array_equal(shard, wanted)


def test_copies_of_a_source_share_the_sending():
    whole = ((0, 8),)
    sources = {0: whole, 1: whole}
    targets = {10 + i: ((2 * i, 2 * i + 2),) for i in range(4)}
    sent = [piece.source for step in assemblies(sources, targets) for piece in step.pieces]
    assert sorted(sent) == [0, 0, 1, 1]


def test_each_byte_crosses_once():
    whole = ((0, 8),)
    steps = assemblies({0: whole}, {10: whole, 11: whole, 12: whole})
    assert [step.copy_of for step in steps] == [None, 10, 10]


def test_a_device_that_holds_the_box_keeps_it():
    whole = ((0, 8),)
    steps = assemblies({0: whole, 1: whole}, {5: whole, 1: whole})
    by_device = {step.device: step for step in steps}
    assert by_device[1].pieces == (Piece(1, whole),)
    assert by_device[5].copy_of == 1


def test_scalars_and_empty_values():
    assert intersection((), ()) == ()
    assert elements(()) == 1
    (step,) = assemblies({0: ((0, 0), (0, 4))}, {1: ((0, 0), (0, 4))})
    assert step.pieces == (Piece(0, ((0, 0), (0, 4))),)
    assert intersection(((0, 2),), ((2, 4),)) is None
