"""A pipeline put together by hand: an MLP of S stages with clipping by global norm.

stage s:  h = tanh(h @ w_s + c_s);    loss = sum((h - y)**2 * m) / B
results:  new weights and biases, the loss, the largest output, the outputs per example, and
          the gradients
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetpass._jax import Jaxpr, Literal, ShapedArray, Var, open_jaxpr
from hetpass.ir.kinds import Batched, Kind, Partial, Whole
from hetpass.ir.plan import Pipeline, Plan, Replica, StagePlan
from hetpass.ir.program import (
    Accumulate,
    Feed,
    Fragment,
    FromSlot,
    InputLeaf,
    Read,
    ReadJoined,
    ReadRow,
    Slot,
    Staged,
    Traced,
    Transfer,
    Write,
    WriteRow,
)

RATE, CLIP = 0.1, 0.05
WHOLE = Whole()


def layer(w: Any, c: Any, h: Any) -> Any:
    return jnp.tanh(h @ w + c)


def step(batch: int) -> Any:
    """The step itself: f(ws, cs, x, y) -> (ws, cs, loss, largest, outputs, gradients)."""

    def loss_of(ws: Any, cs: Any, x: Any, y: Any) -> Any:
        for w, c in zip(ws, cs, strict=True):
            x = layer(w, c, x)
        return ((x - y) ** 2).sum() / batch, x

    def run(ws: Any, cs: Any, x: Any, y: Any) -> Any:
        (loss, out), (dws, dcs) = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(ws, cs, x, y)
        norm = jnp.sqrt(sum((g**2).sum() for g in (*dws, *dcs)))
        scale = jnp.minimum(1.0, CLIP / norm)
        ws = [w - RATE * scale * g for w, g in zip(ws, dws, strict=True)]
        cs = [c - RATE * scale * g for c, g in zip(cs, dcs, strict=True)]
        return ws, cs, loss, out.max(), out, (dws, dcs)

    return run


@dataclass
class Handmade:
    """The staged step, and its arguments."""

    staged: Staged
    arguments: list[np.ndarray]
    expected: list[np.ndarray]


class Maker:
    def __init__(self, batch: int, microbatches: int, dtype: Any) -> None:
        self.b = batch // microbatches
        self.dtype = dtype
        self.slots: list[Slot] = []
        self.fragments: list[Fragment] = []
        self.transfers: list[Transfer] = []
        self.kinds: dict[Var, Kind] = {}

    def slot(
        self,
        stage: int,
        name: str,
        shape: tuple[int, ...],
        scope: str = "step",
        kind: Kind = WHOLE,
        stacked: bool = False,
    ) -> int:
        aval = ShapedArray(shape, self.dtype)
        self.slots.append(Slot(len(self.slots), stage, aval, scope, kind, stacked, name))  # type: ignore[arg-type]
        return len(self.slots) - 1

    def send(self, source: int, stage: int) -> int:
        slot = self.slots[source]
        target = self.slot(
            stage, f"{slot.name}@{stage}", slot.aval.shape, slot.scope, slot.kind, slot.stacked
        )
        self.transfers.append(Transfer(source, target))
        return target

    def fragment(
        self,
        stage: int,
        role: str,
        function: Any,
        inputs: list[Any],
        outputs: list[Any],
        phase: int = 0,
        frees: tuple[int, ...] = (),
        full: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        shapes = full or [self.slots[i.slot].aval.shape for i in inputs]
        avals = [ShapedArray(shape, self.dtype) for shape in shapes]
        jaxpr, consts = open_jaxpr(jax.make_jaxpr(function)(*avals))
        assert not consts
        jaxpr = inline(jaxpr)
        if role in ("forward", "backward", "weight"):
            self.mark(jaxpr, [self.slots[i.slot].kind for i in inputs])
        self.fragments.append(
            Fragment(stage, role, phase, jaxpr, tuple(inputs), tuple(outputs), frees)  # type: ignore[arg-type]
        )

    def mark(self, jaxpr: Jaxpr, inputs: list[Kind]) -> None:
        """Kinds, told by the size b, which no other dimension has."""
        self.kinds.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            kinds = [self.kinds[a] for a in eqn.invars if not isinstance(a, Literal)]
            for var in eqn.outvars:
                op = "max" if eqn.primitive.name == "reduce_max" else "sum"
                if self.b in var.aval.shape:
                    self.kinds[var] = Batched(var.aval.shape.index(self.b))
                elif any(isinstance(k, (Batched, Partial)) for k in kinds):
                    self.kinds[var] = Partial(op)  # type: ignore[arg-type]
                else:
                    self.kinds[var] = Whole()


def inline(jaxpr: Jaxpr) -> Jaxpr:
    """Nested jits evaluated away."""

    def flat(j: Jaxpr, values: list[Any]) -> list[Any]:
        env = dict(zip(j.invars, values, strict=True))

        def read(a: Any) -> Any:
            return a.val if isinstance(a, Literal) else env[a]

        for eqn in j.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                out = flat(open_jaxpr(eqn.params["jaxpr"])[0], [read(a) for a in eqn.invars])
            else:
                out = eqn.primitive.bind(*[read(a) for a in eqn.invars], **eqn.params)
                out = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(a) for a in j.outvars]

    return open_jaxpr(
        jax.make_jaxpr(lambda *v: flat(jaxpr, list(v)))(*[v.aval for v in jaxpr.invars])
    )[0]


def mlp(
    stages: int,
    microbatches: int,
    batch: int = 24,
    width: int = 8,
    dtype: Any = np.float32,
    donated: bool = True,
) -> Handmade:
    make = Maker(batch, microbatches, dtype)
    b, s_range = make.b, range(stages)
    last = stages - 1
    batched = Batched(0)
    ws = [make.slot(s, f"w{s}", (width, width)) for s in s_range]
    cs = [make.slot(s, f"c{s}", (width,)) for s in s_range]
    xs = make.slot(0, "x", (b, width), kind=batched, stacked=True)
    ys = make.slot(last, "y", (b, width), kind=batched, stacked=True)
    dws = [make.slot(s, f"dw{s}", (width, width), kind=Partial("sum")) for s in s_range]
    dcs = [make.slot(s, f"dc{s}", (width,), kind=Partial("sum")) for s in s_range]
    loss = make.slot(last, "loss", (), kind=Partial("sum"))
    top = make.slot(last, "top", (), kind=Partial("max"))
    outs = make.slot(last, "outs", (b, width), kind=batched, stacked=True)

    ins: list[Any] = [ReadRow(xs)]
    for s in s_range:
        h = make.slot(s, f"h{s}", (b, width), "microbatch", batched)
        if s == last:
            make.fragment(
                s,
                "forward",
                lambda w, c, h, y: (lambda o: (o, o, ((o - y) ** 2).sum() / batch, o.max()))(
                    layer(w, c, h)
                ),
                [Read(ws[s]), Read(cs[s]), ins[s], ReadRow(ys)],
                [Write(h), WriteRow(outs), Accumulate(loss), Accumulate(top)],
            )
        else:
            make.fragment(s, "forward", layer, [Read(ws[s]), Read(cs[s]), ins[s]], [Write(h)])
            ins.append(Read(make.send(h, s + 1)))
    dh: Any = None
    for s in reversed(s_range):
        h = next(slot.index for slot in make.slots if slot.name == f"h{s}")

        def backward(w: Any, c: Any, x: Any, o: Any, seed: Any, s: int = s) -> Any:
            seed = 2 * (o - seed) / batch if s == last else seed
            pulled = jax.vjp(layer, w, c, x)[1](seed)
            return pulled if s else pulled[:2]

        outputs: list[Any] = [Accumulate(dws[s]), Accumulate(dcs[s])]
        d = None
        if s:
            d = make.slot(s, f"dh{s}", (b, width), "microbatch", batched)
            outputs.append(Write(d))
        frees = [i.slot for i in (ins[s], dh) if isinstance(i, Read)] + [h]
        make.fragment(
            s,
            "backward",
            backward,
            [Read(ws[s]), Read(cs[s]), ins[s], Read(h), ReadRow(ys) if s == last else dh],
            outputs,
            frees=tuple(frees),
        )
        if d is not None:
            dh = Read(make.send(d, s - 1))

    norms, grads = [], []
    for s in s_range:
        g_w = make.slot(s, f"g_w{s}", (width, width))
        g_c = make.slot(s, f"g_c{s}", (width,))
        n = make.slot(s, f"n{s}", ())
        grads += [(g_w, g_c)]
        make.fragment(
            s,
            "epilogue",
            lambda a, c: (a, c, (a**2).sum() + (c**2).sum()),
            [Read(dws[s]), Read(dcs[s])],
            [Write(g_w), Write(g_c), Write(n)],
            frees=(dws[s], dcs[s]),
        )
        norms.append(make.send(n, 0) if s else n)
    scale = make.slot(0, "scale", ())
    make.fragment(
        0,
        "epilogue",
        lambda *n: (jnp.minimum(1.0, CLIP / jnp.sqrt(sum(n))),),
        [Read(n) for n in norms],
        [Write(scale)],
        phase=1,
    )
    new_ws, new_cs = [], []
    for s in s_range:
        new_ws.append(make.slot(s, f"w{s}+", (width, width)))
        new_cs.append(make.slot(s, f"c{s}+", (width,)))
        make.fragment(
            s,
            "epilogue",
            lambda w, c, a, d, k: (w - RATE * k * a, c - RATE * k * d),
            [
                Read(ws[s]),
                Read(cs[s]),
                Read(grads[s][0]),
                Read(grads[s][1]),
                Read(make.send(scale, s) if s else scale),
            ],
            [Write(new_ws[s]), Write(new_cs[s])],
            phase=2,
            frees=(ws[s], cs[s]),
        )
    joined = make.slot(last, "joined", (batch, width))
    make.fragment(
        last,
        "epilogue",
        lambda o: (o,),
        [ReadJoined(outs)],
        [Write(joined)],
        phase=3,
        full=((batch, width),),
    )

    rng = np.random.default_rng(0)
    w = [rng.normal(size=(width, width)).astype(dtype) * 0.5 for _ in s_range]
    c = [rng.normal(size=(width,)).astype(dtype) for _ in s_range]
    x, y = (rng.normal(size=(batch, width)).astype(dtype) for _ in range(2))
    traced_jaxpr, _ = open_jaxpr(jax.make_jaxpr(step(batch))(w, c, x, y))
    paths = [f"state.w[{s}]" for s in s_range] + [f"state.c[{s}]" for s in s_range]
    leaves = [
        InputLeaf(
            p,
            v.aval,
            0 if p.startswith("state") else 1,
            None if p.startswith("state") else 0,
            donated and p.startswith("state"),
        )
        for p, v in zip([*paths, "x", "y"], traced_jaxpr.invars, strict=True)
    ]
    traced = Traced("mlp", traced_jaxpr, (), "", tuple(leaves), (), None, None, (), batch, ())
    layered: Any = types.SimpleNamespace(program=types.SimpleNamespace(traced=traced))
    results = [*new_ws, *new_cs, loss, top, joined]
    results += [g for g, _ in grads] + [g for _, g in grads]
    staged = Staged(
        layered=layered,
        num_stages=stages,
        num_microbatches=microbatches,
        slots=tuple(make.slots),
        fragments=tuple(make.fragments),
        transfers=tuple(make.transfers),
        kinds=make.kinds,
        feeds=tuple(Feed(i, s) for i, s in enumerate([*ws, *cs, xs, ys])),
        results=tuple(FromSlot(r) for r in results),
        pairs=tuple((i, i) for i in range(2 * stages)),
    )
    expected = jax.tree.leaves(jax.jit(step(batch))(w, c, x, y))
    return Handmade(staged, [*w, *c, x, y], [np.asarray(e) for e in expected])


def plan_of(
    *meshes: tuple[tuple[str, int], ...], microbatches: int = 1, shared: bool = False
) -> Plan:
    """One stage per mesh; group g<i> has its own devices."""
    stages = []
    for number, mesh in enumerate(meshes):
        size = int(np.prod([n for _, n in mesh], dtype=int))
        stages.append(StagePlan(number, number, (Replica(f"g{number}", tuple(range(size)), mesh),)))
    return Plan((Pipeline(tuple(stages), microbatches),))


def devices_of(plan: Plan) -> dict[str, list[jax.Device]]:
    """Disjoint devices for every stage of the plan."""
    pool, found = list(jax.devices()), {}
    for stage in plan.pipelines[0].stages:
        replica = stage.replicas[0]
        found[replica.group] = [pool.pop(0) for _ in replica.devices]
    return found
