"""tag_operations: every region equation carries the operation of its layer that it is.

Partition moves, copies and cuts equations; an assignment speaks of the operations of a layer. So
before partition every equation, also inside loops and branches, gets the layer and the path of its
operation (`analysis.layer_operations`) as the innermost name of its stack. The compiler keeps these
names, so that a collective in the compiled program can be traced back, too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hetpass._jax import (
    Jaxpr,
    JaxprEqn,
    close,
    is_jaxpr,
    make_jaxpr_value,
    name_stack,
    open_jaxpr,
    with_scope,
)
from hetpass.analysis.layer_operations import LayerEquations, Path
from hetpass.ir.program import Layered

_TAG = re.compile(r"hetpass\.(\d+)\.([\d.]+)")


def tag_operations(layered: Layered, equations: LayerEquations) -> Layered:
    """The same program with tags; variables stay what they are.

    An equation of several layers (a scan over layers) has the tag of the first. What any fragment
    may make for itself has none.
    """
    region = layered.program.region
    first: dict[int, tuple[int, int]] = {}
    for layer, members in enumerate(equations.members):
        for ordinal, number in enumerate(members):
            first.setdefault(number, (layer, ordinal))
    eqns = [
        _tagged(eqn, first[number][0], (first[number][1],)) if number in first else eqn
        for number, eqn in enumerate(region.eqns)
    ]
    rebuilt = make_jaxpr_value(region.invars, region.outvars, eqns, region.constvars)
    return replace(layered, program=replace(layered.program, region=rebuilt))


def operation_tag(eqn: JaxprEqn) -> tuple[int, Path] | None:
    """(layer, path) of a tagged equation."""
    found = _TAG.findall(name_stack(eqn))
    if not found:
        return None
    layer, path = found[-1]
    return int(layer), tuple(map(int, path.split(".")))


def _tagged(eqn: JaxprEqn, layer: int, path: Path) -> JaxprEqn:
    name = eqn.primitive.name
    params = dict(eqn.params)
    if name == "scan":
        params["jaxpr"] = _body(params["jaxpr"], layer, (*path, 0))
    elif name == "while":
        params["cond_jaxpr"] = _body(params["cond_jaxpr"], layer, (*path, 0))
        params["body_jaxpr"] = _body(params["body_jaxpr"], layer, (*path, 1))
    elif name == "cond":
        params["branches"] = tuple(
            _body(branch, layer, (*path, k)) for k, branch in enumerate(params["branches"])
        )
    tag = f"hetpass.{layer}.{'.'.join(map(str, path))}"
    return with_scope(eqn.replace(params=params), tag)


def _body(value: Any, layer: int, path: Path) -> Any:
    assert is_jaxpr(value)
    jaxpr, consts = open_jaxpr(value)
    eqns = [_tagged(eqn, layer, (*path, k)) for k, eqn in enumerate(jaxpr.eqns)]
    body: Jaxpr = make_jaxpr_value(jaxpr.invars, jaxpr.outvars, eqns, jaxpr.constvars)
    return close(body, consts)
