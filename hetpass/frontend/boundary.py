"""`stage_boundary`: a user's mark that a stage may begin here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from hetpass import _jax
from hetpass.errors import TraceError
from hetpass.frontend.trace import abstract

T = TypeVar("T")

boundary_p = _jax.Primitive("hetpass_stage_boundary")


def stage_boundary(x: T, name: str = "") -> T:
    """Return `x` unchanged, and mark that a layer begins at this point of the forward pass.

    The automatic cuts stay: a mark adds one, and is remembered in `Layered.boundaries`. Outside
    hetpass it is the identity. It may be differentiated and vmapped.

    Args:
      x: an array or a pytree of arrays.
      name: for people; appears in the printed program.

    Raises:
      TraceError: HP-TRACE-ARGUMENT, a leaf is no array.
    """
    if not isinstance(name, str):
        raise TraceError(
            "HP-TRACE-OPTION",
            f"the name of a boundary is a {type(name).__name__}",
            where="stage_boundary: name",
            ways_out=['stage_boundary(x, "encoder")'],
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        abstract(leaf, f"x{jax.tree_util.keystr(path)}")
    return jax.tree.map(lambda leaf: boundary_p.bind(leaf, name=name), x)


def _same(x: Any, *, name: str) -> Any:
    del name
    return x


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, name: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    return boundary_p.bind(x, name=name), tangent


def _batch(args: Sequence[Any], dims: Sequence[Any], *, name: str) -> tuple[Any, Any]:
    return boundary_p.bind(args[0], name=name), dims[0]


_jax.define_identity(boundary_p, impl=_same, jvp=_jvp, batch=_batch)
