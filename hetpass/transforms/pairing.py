"""Which output leaves are input leaves that come back: the state of a train step.

`state.params['w']` of the first argument and `[0].params['w']` of the result are one leaf of one
state. An argument is matched as a whole: it comes back under the prefix of the result where most
of its leaves find an output of equal path and aval.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetpass._jax import ShapedArray
from hetpass.ir.program import InputLeaf

_KEY = re.compile(r"\.[^.\[\]]+|\[(?:'[^']*'|\"[^\"]*\"|[^\]]*)\]")
_MAX_PREFIX = 4

Keys = tuple[str, ...]


def pair_leaves(
    inputs: Sequence[InputLeaf], out_paths: Sequence[str], out_avals: Sequence[ShapedArray]
) -> tuple[tuple[int, int], ...]:
    """(input, output) leaf numbers of donated inputs that come back, in order of the inputs.

    Each input and each output is in one pair at most.
    """
    outputs = {_keys(path): j for j, path in enumerate(out_paths)}
    prefixes = list(
        dict.fromkeys(keys[:n] for keys in outputs for n in range(min(len(keys), _MAX_PREFIX) + 1))
    )
    by_argument: dict[int, list[tuple[int, Keys]]] = {}
    for i, leaf in enumerate(inputs):
        if leaf.donated and leaf.argnum is not None:
            by_argument.setdefault(leaf.argnum, []).append((i, _argument_keys(leaf)))
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for leaves in by_argument.values():
        best: list[tuple[int, int]] = []
        for prefix in prefixes:
            found = []
            for i, keys in leaves:
                j = outputs.get(prefix + keys)
                if j is not None and j not in taken and _same(inputs[i].aval, out_avals[j]):
                    found.append((i, j))
            if len(found) > len(best):
                best = found
        taken.update(j for _, j in best)
        pairs += best
    return tuple(sorted(pairs))


def _argument_keys(leaf: InputLeaf) -> Keys:
    """The keys below the argument; one without a name is called `args[1]`."""
    return _keys(leaf.path.removeprefix(f"args[{leaf.argnum}]"))


def _keys(path: str) -> Keys:
    """`state.params['w']` -> (".params", "['w']"): the path below the argument's name."""
    start = min((k for k in (path.find("."), path.find("[")) if k >= 0), default=len(path))
    return tuple(_KEY.findall(path[start:]))


def _same(a: ShapedArray, b: ShapedArray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
