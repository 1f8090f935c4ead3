from typing import Any

import jax
from flax import struct

from hetpass.tree_difference import tree_difference


@struct.dataclass
class State:
    params: Any
    settings: Any = struct.field(pytree_node=False)


def _lines(one: Any, other: Any) -> list[str]:
    trees = jax.tree.structure(one), jax.tree.structure(other)
    return tree_difference(*trees, ("compiled for", "called with"))


def test_equal_trees_have_no_difference() -> None:
    assert _lines({"a": 1}, {"a": 2}) == []


def test_a_key_that_is_missing_is_shown_at_its_path() -> None:
    lines = _lines(({"a": {"x": 1, "y": 2}},), ({"a": {"x": 1}},))
    assert lines[0] == "at [0]['a']:"
    assert lines[1] != lines[2]
    assert all("compiled for" in line or "called with" in line for line in lines[1:])


def test_long_static_parts_are_cut_around_what_differs() -> None:
    same = "the same words over and over, " * 40
    lines = _lines((State(1, same + "left" + same),), (State(1, same + "right" + same),))
    assert lines[0] == "at [0]:"
    assert "left" in lines[1]
    assert "right" in lines[2]
    assert max(map(len, lines)) < 250


def test_three_places_at_most() -> None:
    one = {str(k): (1, 2) for k in range(9)}
    other = {str(k): [1, 2] for k in range(9)}
    assert sum(line.startswith("at ") for line in _lines(one, other)) == 3
