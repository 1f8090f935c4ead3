"""Layered programs for tests, made from three functions instead of from a traced step.

    prologue(inputs)              -> {name: full-batch value}
    region(whole, rows, offset)   -> {name: value of one microbatch}
    epilogue(inputs, pro, totals) -> the step's result

A region function says its layers with `jax.named_scope("layer2")` ("layers2to5" for a scan over
layers); autodiff marks backward equations. Kinds come from tracing at two batch sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass._jax import DropVar, Literal, Var, make_jaxpr_value, make_var, name_stack, open_jaxpr
from hetpass.ir.kinds import Batched, Kind, Partial, Whole
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.program import (
    Accumulated,
    InputLeaf,
    Joined,
    Layered,
    LayerSpan,
    OffsetInput,
    SliceInput,
    StepProgram,
    Traced,
    WholeInput,
)
from hetpass.transforms.splice import inline

Values = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A step in three functions, and its arguments.

    Attributes:
      state: donated, free of the batch; any tree.
      batch: examples along dimension 0.
      whole: the names of prologue results that the region reads whole; `rows`: that it slices.
      joined: the names of region results that are slices; `ops`: of the combined ones that are
        not sums.
    """

    state: Any
    batch: Values
    region: Callable[[Values, Values, Any], Values]
    epilogue: Callable[[Any, Values, Values, Values], Any]
    num_layers: int
    prologue: Callable[[Any, Values], Values] = lambda state, batch: {}
    whole: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    ops: Values = field(default_factory=dict)

    def reference(self, state: Any, batch: Values) -> Any:
        pro = self.prologue(state, batch)
        whole = {"state": state, **{k: pro[k] for k in self.whole}}
        rows = {**batch, **{k: pro[k] for k in self.rows}}
        totals = self.region(whole, rows, jnp.int32(0))
        return self.epilogue(state, batch, pro, totals)


def layered(example: Example, num_microbatches: int) -> Layered:
    """The example as the passes before partition would hand it over."""
    traced = _traced(example)
    full_inputs = list(traced.jaxpr.invars)
    tree = jax.tree.structure((example.state, example.batch))
    state_vars, batch_vars = jax.tree.unflatten(tree, full_inputs)

    pro_eqns, pro = _inlined(example.prologue, (state_vars, batch_vars))
    pro = {name: _named(pro_eqns, value) for name, value in pro.items()}
    whole_vars = {"state": state_vars, **{k: pro[k] for k in example.whole}}
    row_vars = {**batch_vars, **{k: pro[k] for k in example.rows}}
    region, double, out_names = _regions(example, whole_vars, row_vars, num_microbatches)

    sources = [WholeInput(v) for v in jax.tree.leaves(whole_vars)]
    sources += [SliceInput(v, Batched(0)) for v in jax.tree.leaves(row_vars)]
    kinds = _kinds(region, double, len(sources) - len(jax.tree.leaves(row_vars)))

    targets, outputs = {}, []
    full_shapes = jax.eval_shape(
        example.region, _shapes(whole_vars), _shapes(row_vars), jax.ShapeDtypeStruct((), "int32")
    )
    for name, var in zip(out_names, region.outvars, strict=True):
        full = full_shapes[name]
        targets[name] = make_var(var.aval.update(shape=full.shape))
        if name in example.joined:
            outputs.append(Joined(targets[name], Batched(0)))
        else:
            wide = var.aval.dtype
            if jnp.issubdtype(wide, jnp.floating):
                wide = jnp.promote_types(wide, jnp.float32)
            outputs.append(Accumulated(targets[name], example.ops.get(name, "sum"), wide))
    epi_eqns, result = _inlined(example.epilogue, (state_vars, batch_vars, pro, targets))
    program = StepProgram(
        traced=traced,
        num_microbatches=num_microbatches,
        prologue=tuple(pro_eqns),
        region=region,
        region_inputs=(*sources, OffsetInput()),
        region_outputs=tuple(outputs),
        kinds=kinds,
        origin=tuple(range(len(region.eqns))),
        epilogue=tuple(epi_eqns),
        outvars=tuple(jax.tree.leaves(result, is_leaf=lambda v: isinstance(v, (Var, Literal)))),
    )
    spans, backward = _layers(region, example.num_layers)
    count = example.num_layers
    return Layered(
        program=program,
        num_layers=count,
        spans=spans,
        backward=backward,
        layer_kinds=tuple(range(count)),
        forward_flops=(1.0,) * count,
        backward_flops=(2.0,) * count,
        cut_bytes=(0.0,) * max(count - 1, 0),
        names=tuple(f"layer{k}" for k in range(count)),
    )


def plan(
    *sizes: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    recomputed: Collection[int] = (),
) -> Plan:
    """A plan with so many layers on each stage."""
    stages, first = [], 0
    for index, size in enumerate(sizes):
        replica = Replica("cpu", (index,), (("data", 1),))
        how = "full" if index in recomputed else "none"
        stages.append(StagePlan(first, first + size - 1, (replica,), recompute=how))
        first += size
    return Plan((Pipeline(tuple(stages), num_microbatches),), schedule)


# ---------------------------------------------------------------------------------------------


def _traced(example: Example) -> Traced:
    args = (example.state, example.batch)
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(example.reference)(*args))
    assert not consts
    out = jax.eval_shape(example.reference, *args)
    inputs = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        argnum = path[0].idx
        name = ("state", "batch")[argnum] + jax.tree_util.keystr(path[1:])
        aval = jax.typeof(jnp.asarray(leaf))
        inputs.append(InputLeaf(name, aval, argnum, 0 if argnum else None, argnum == 0))
    paths = jax.tree_util.tree_flatten_with_path(out)[0]
    return Traced(
        name="example",
        jaxpr=jaxpr,
        probes=(),
        probe_failure="",
        inputs=tuple(inputs),
        constants=(),
        in_tree=jax.tree.structure((args, {})),
        out_tree=jax.tree.structure(out),
        out_paths=tuple("result" + jax.tree_util.keystr(path) for path, _ in paths),
        batch_size=_batch_size(example),
        recomputed=(False,) * len(jaxpr.eqns),
    )


def _batch_size(example: Example) -> int:
    return next((leaf.shape[0] for leaf in jax.tree.leaves(example.batch)), 1)


def _shapes(tree: Any, rows: int | None = None) -> Any:
    def shape(var: Any) -> Any:
        dims = var.aval.shape if rows is None else (rows, *var.aval.shape[1:])
        return jax.ShapeDtypeStruct(dims, var.aval.dtype, weak_type=var.aval.weak_type)

    return jax.tree.map(shape, tree)


def _inlined(function: Any, trees: Any) -> tuple[list[Any], Any]:
    """Equations over the given variables, and the function's result as a tree of atoms."""
    shapes = _shapes(trees)
    jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*shapes))
    assert not consts
    jaxpr = flat(jaxpr)
    out = jax.eval_shape(function, *shapes)
    spliced = inline(jaxpr, jax.tree.leaves(trees))
    return list(spliced.eqns), jax.tree.unflatten(jax.tree.structure(out), spliced.outs)


def _named(eqns: list[Any], value: Any) -> Any:
    """A prologue result that is an input or a constant gets an equation of its own."""
    assert isinstance(value, Var), "give the prologue something to compute"
    return value


def flat(jaxpr: Any) -> Any:
    """The same with calls (`jit`, `remat`, custom derivatives) inlined, as tracing does."""
    calls = (
        "jit",
        "pjit",
        "checkpoint",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "closed_call",
    )
    env: dict[Any, Any] = {}
    eqns: list[Any] = []

    def atom(v: Any) -> Any:
        return v if isinstance(v, Literal) else env.get(v, v)

    def walk(body: Any, stack: str) -> None:
        for eqn in body.eqns:
            eqn = eqn.replace(invars=[atom(v) for v in eqn.invars])
            if eqn.primitive.name in calls:
                key = next(k for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params)
                inner, consts = open_jaxpr(eqn.params[key])
                assert not consts
                spliced = inline(inner, eqn.invars)
                walk(_Body(spliced.eqns, eqn), stack)
                for var, out in zip(eqn.outvars, spliced.outs, strict=True):
                    env[var] = atom(out)
            else:
                if isinstance(body, _Body):
                    info = eqn.source_info
                    info = info.replace(
                        name_stack=body.call.source_info.name_stack + info.name_stack
                    )
                    eqn = eqn.replace(source_info=info)
                eqns.append(eqn)

    walk(jaxpr, "")
    return make_jaxpr_value(jaxpr.invars, [atom(v) for v in jaxpr.outvars], eqns)


@dataclass
class _Body:
    """Equations of an inlined call, and the call."""

    eqns: Any
    call: Any


def _regions(example: Example, whole: Any, rows: Any, num_microbatches: int) -> Any:
    """The region at b, the region at 2b, and the names of its results in order."""
    size = _batch_size(example) // num_microbatches
    bodies = []
    for count in (size, 2 * size):
        offset = jax.ShapeDtypeStruct((), "int32")
        args = (_shapes(whole), _shapes(rows, count), offset)
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(example.region)(*args))
        assert not consts
        bodies.append(flat(jaxpr))
    names = sorted(jax.eval_shape(example.region, *args))
    return *bodies, names


def _kinds(region: Any, double: Any, num_whole: int) -> dict[Var, Kind]:
    kinds: dict[Var, Kind] = {}
    touched: set[Any] = set(region.invars[num_whole:])
    pairs = list(zip(region.invars, double.invars, strict=True))
    for eqn, twin in zip(region.eqns, double.eqns, strict=True):
        assert eqn.primitive is twin.primitive
        if any(isinstance(v, Var) and v in touched for v in eqn.invars):
            touched.update(eqn.outvars)
        pairs += zip(eqn.outvars, twin.outvars, strict=True)
    for var, twin in pairs:
        if isinstance(var, DropVar):
            continue
        grown = [
            d
            for d, (a, b) in enumerate(zip(var.aval.shape, twin.aval.shape, strict=True))
            if a != b
        ]
        if grown:
            kinds[var] = Batched(grown[0])
        elif var in touched and var not in region.invars:
            kinds[var] = Partial("sum")
        else:
            kinds[var] = Whole()
    return kinds


def _layers(region: Any, num_layers: int) -> tuple[Any, Any]:
    """Spans from scopes, else from operands; backward from the mark of transposition."""
    spans: list[LayerSpan] = []
    backward: list[bool] = []
    where: dict[Any, tuple[LayerSpan, bool]] = {}
    for eqn in region.eqns:
        stack = name_stack(eqn)
        operands = [where[v] for v in eqn.invars if isinstance(v, Var) and v in where]
        back = "transpose(" in stack or any(b for _, b in operands)
        many = re.search(r"layers(\d+)to(\d+)", stack)
        one = re.search(r"layer(\d+)", stack)
        if many:
            span = LayerSpan(int(many[1]), int(many[2]))
        elif one:
            span = LayerSpan(int(one[1]), int(one[1]))
        elif back:
            layer = min((s.first for s, b in operands if b), default=num_layers - 1)
            span = LayerSpan(layer, layer)
        else:
            layer = max((s.last for s, b in operands), default=0)
            span = LayerSpan(layer, layer)
        if eqn.primitive.name != "scan" and span.first != span.last:
            layer = span.first if back else span.last
            span = LayerSpan(layer, layer)
        spans.append(span)
        backward.append(back)
        where.update((v, (span, back)) for v in eqn.outvars)
    return tuple(spans), tuple(backward)


def random_tree(shapes: Any, seed: int = 0) -> Any:
    """Normal numbers in the given shapes (a tree whose leaves are tuples of sizes)."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), jnp.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )
