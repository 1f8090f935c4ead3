"""Layouts follow elements through casts, transposes, reshapes, branches and slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetpass._jax import Var
from hetpass.analysis.element_groups import Axes, ElementGroups, moved

SIZES = {"x": 2, "y": 4}


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def groups_of(
    function: Callable[..., Any], *avals: Any, with_parts: bool = False
) -> tuple[ElementGroups, list[Var], list[Var]]:
    jaxpr = jax.make_jaxpr(function)(*avals).jaxpr
    groups = ElementGroups(with_parts)
    for eqn in jaxpr.eqns:
        groups.visit(eqn)
    return groups, list(jaxpr.invars), list(jaxpr.outvars)


def across(axes: Axes, groups: ElementGroups, source: Var, target: Var) -> Axes | None:
    return moved(axes, groups.dims_of(source), groups.dims_of(target), SIZES)


def test_casts_and_transposes() -> None:
    groups, (w,), (out,) = groups_of(lambda w: w.astype("bfloat16").T * 2, array(8, 4))
    assert groups.root(w) is groups.root(out)
    assert across((("x",), ()), groups, w, out) == ((), ("x",))
    assert across((("x",), ("y",)), groups, out, w) == (("y",), ("x",))


def test_reshapes_cut_major_to_minor() -> None:
    groups, (w,), (out,) = groups_of(lambda w: w.reshape(8, 8), array(8, 2, 4))
    assert across(((), ("x",), ()), groups, w, out) == ((), ("x",))
    assert across(((), ("x", "y")), groups, out, w) == ((), ("x",), ("y",))
    assert across(((), (), ("y",)), groups, w, out) is None  # the minor part without the major


def test_an_update_joins_all_that_it_combines() -> None:
    def update(p: Any, m: Any, g: Any, other: Any) -> Any:
        m = 0.9 * m + g.T
        return p - 0.1 * m, m, other + jnp.sum(g)

    groups, (p, m, g, other), outs = groups_of(update, *[array(8, 8)] * 4)
    assert groups.root(p) is groups.root(m) is groups.root(g) is groups.root(outs[0])
    assert groups.root(p) is not groups.root(other)
    assert across((("x",), ("y",)), groups, p, g) == (("y",), ("x",))


def test_branches_are_looked_into() -> None:
    def update(flag: Any, p: Any, g: Any) -> Any:
        return jax.lax.cond(flag, lambda p, g: p - g, lambda p, g: p, p, g)

    groups, (_, p, g), (out,) = groups_of(update, array(dtype="bool"), array(8), array(8))
    assert groups.root(p) is groups.root(g) is groups.root(out)


def test_slices_join_only_where_asked() -> None:
    for with_parts in (False, True):
        groups, (w,), (out,) = groups_of(lambda w: w[:2], array(4, 8), with_parts=with_parts)
        assert (groups.root(w) is groups.root(out)) == with_parts
        assert across(((), ("y",)), groups, w, out) == ((), ("y",) if with_parts else ())
