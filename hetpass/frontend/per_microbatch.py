"""The per-microbatch meaning, on request: the step means the mean of itself over the M slices.

For steps that mix examples (batch norm, a contrastive loss, experts with a capacity per call),
where the full batch's meaning cannot be had in microbatches. The region is then the step's heavy
part as it would be traced for one slice of b = B / M examples, every number included: a mean's
1 / N is the slice's, random draws and positions too. What leaves the region is the mean over the
slices (integers: the sum); results per example are joined. The rest of the step, the optimizer
with it, runs once on these means.

For a step whose update is linear in the gradient (SGD) that equals the mean of `jax.jit(step)`
over the M slices; in general it is the step with its gradients averaged over the slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from hetpass import _jax
from hetpass._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from hetpass.errors import SplitError
from hetpass.frontend.assemble import accumulator_dtype, scaled
from hetpass.frontend.instantiate import Region
from hetpass.frontend.probes import Probes
from hetpass.frontend.refusal import describe
from hetpass.frontend.rules.apply import apply
from hetpass.frontend.rules.control_flow import all_variables
from hetpass.frontend.rules.values import WHOLE, Context, Mixes, Val
from hetpass.frontend.unsplit import heavy_part
from hetpass.ir.kinds import Batched
from hetpass.ir.program import (
    Accumulated,
    Joined,
    RegionInput,
    RegionOutput,
    SliceInput,
    StepProgram,
    Traced,
    WholeInput,
)


def per_microbatch(traced: Traced, probes: Probes, num_microbatches: int) -> StepProgram:
    """The step's heavy part at b for each slice, and the rest on the means.

    Raises:
      SplitError: HP-SPLIT-SLICE, some value has a size or a number that is not known at b, or a
        result per example whose examples cannot be told apart.
    """
    assert traced.batch_size is not None
    slices = _Slices(traced, probes, num_microbatches)
    part = heavy_part(traced, slices.size_dependent())
    context = Context(probes.growth, traced.batch_size, apply)
    context.nested = {v: WHOLE for e in traced.jaxpr.eqns for v in _nested_variables(e)}
    values = {v: slices.value(v) for v in probes.growth}
    region = Region(probes, context, num_microbatches, values, of_slice=True)
    body: list[JaxprEqn] = []
    origin: list[int] = []
    for index in part.region:
        made = slices.region_equations(region, traced.jaxpr.eqns[index])
        body += made
        origin += [index] * len(made)
    inputs, invars = _inputs(part.reads, region)
    outputs: list[RegionOutput] = []
    after: list[JaxprEqn] = []
    for var in part.results:
        output, made = slices.output(var)
        outputs.append(output)
        after += made
    return StepProgram(
        traced=traced,
        num_microbatches=num_microbatches,
        prologue=tuple(traced.jaxpr.eqns[i] for i in part.before),
        region=_jax.make_jaxpr_value(invars, [region.variable(v) for v in part.results], body),
        region_inputs=inputs,
        region_outputs=tuple(outputs),
        kinds=region.kinds,
        origin=tuple(origin),
        epilogue=(*after, *(traced.jaxpr.eqns[i] for i in part.after)),
        outvars=tuple(traced.jaxpr.outvars),
    )


def _inputs(reads: Sequence[Var], region: Region) -> tuple[tuple[RegionInput, ...], list[Var]]:
    inputs: list[RegionInput] = []
    for var in reads:
        kind = region.values[var].kind
        inputs.append(SliceInput(var, kind) if isinstance(kind, Batched) else WholeInput(var))
    return tuple(inputs), [region.variable(v) for v in reads]


def _nested_variables(eqn: JaxprEqn) -> list[Var]:
    found: list[Var] = []
    for param in eqn.params.values():
        for nested in param if isinstance(param, tuple) else (param,):
            if _jax.is_jaxpr(nested):
                found += all_variables(_jax.open_jaxpr(nested)[0])
    return found


@dataclass(frozen=True)
class _Slices:
    """What is known of the program at b."""

    traced: Traced
    probes: Probes
    num_microbatches: int

    def value(self, var: Var) -> Val:
        """Sliced along the one dimension that grows; everything else is the slice's own."""
        growth = self.probes.growth[var]
        grown = [] if growth is None else [d for d, g in enumerate(growth) if g]
        if len(grown) == 1 and growth is not None and growth[grown[0]] == var.aval.shape[grown[0]]:
            return Val(Batched(grown[0], 1))
        return WHOLE

    def size_dependent(self) -> set[int]:
        """Equations on a number or a size that depends on the batch belong to the slice."""
        return {
            i
            for i, eqn in enumerate(self.traced.jaxpr.eqns)
            if any(not _same(a, b) for a, b in self._literals(eqn))
            or any(self._grows(v) for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var))
        }

    def _grows(self, var: Var) -> bool:
        growth = self.probes.growth[var]
        return growth is None or any(growth)

    def region_equations(self, region: Region, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equation at b.

        Raises:
          SplitError: a size is no whole number there.
        """
        try:
            return region.equation(self.at_slice(eqn), (), ())
        except (ValueError, Mixes) as error:
            raise self._refusal(eqn, f"has a size that a slice cannot have ({error})") from None

    def _literals(self, eqn: JaxprEqn) -> list[tuple[Any, Any]]:
        doubled = self.probes.doubled[id(eqn)]
        return [
            (a.val, b.val)
            for a, b in zip(eqn.invars, doubled.invars, strict=True)
            if isinstance(a, Literal) and isinstance(b, Literal)
        ]

    def at_slice(self, eqn: JaxprEqn) -> JaxprEqn:
        """The equation with its numbers at b; the id-keyed facts of the old one are kept."""
        doubled = self.probes.doubled[id(eqn)]
        operands = [
            self._number(eqn, a, b) for a, b in zip(eqn.invars, doubled.invars, strict=True)
        ]
        params = {
            name: self._nested(value, doubled.params[name]) for name, value in eqn.params.items()
        }
        made = _jax.make_eqn(eqn, operands, eqn.outvars, params)
        self.probes.doubled[id(made)] = doubled
        return made

    def _nested(self, param: Any, doubled: Any) -> Any:
        if isinstance(param, tuple) and param and all(_jax.is_jaxpr(p) for p in param):
            return tuple(self._nested(p, d) for p, d in zip(param, doubled, strict=True))
        if not _jax.is_jaxpr(param):
            return param
        jaxpr, consts = _jax.open_jaxpr(param)
        if any(id(e) not in self.probes.doubled for e in jaxpr.eqns):
            return param  # not looked into by the probes: holds no size of the batch
        eqns = [self.at_slice(e) for e in jaxpr.eqns]
        body: Jaxpr = _jax.make_jaxpr_value(
            jaxpr.invars, jaxpr.outvars, eqns, constvars=jaxpr.constvars
        )
        return _jax.close(body, consts)

    def _number(self, eqn: JaxprEqn, full: Atom, doubled: Atom) -> Atom:
        if not isinstance(full, Literal) or _same(full.val, doubled.val):
            return full
        a, b = np.asarray(full.val, np.float64), np.asarray(doubled.val, np.float64)
        back = (self.num_microbatches - 1) / self.num_microbatches
        integer = np.issubdtype(np.asarray(full.val).dtype, np.integer)
        if not integer and np.allclose(b * 2, a, rtol=1e-6):  # 1 / N
            at_b = a * self.num_microbatches
        else:
            at_b = a - (b - a) * back
        if integer and at_b != np.round(at_b):
            raise self._refusal(eqn, f"has the number {full.val}, which is not known for a slice")
        value = np.asarray(at_b, np.asarray(full.val).dtype)[()]
        if integer:
            value = np.asarray(np.round(at_b), np.asarray(full.val).dtype)[()]
        return Literal(value, full.aval)

    def output(self, var: Var) -> tuple[RegionOutput, list[JaxprEqn]]:
        """How the slices' values of a variable make one, and the equations that finish it."""
        if self._grows(var):
            kind = self.value(var).kind
            if not isinstance(kind, Batched):
                index = next(i for i, e in enumerate(self.traced.jaxpr.eqns) if var in e.outvars)
                raise self._refusal(
                    self.traced.jaxpr.eqns[index],
                    "gives a result for the whole batch that slices cannot make up",
                )
            return Joined(var, kind), []
        dtype = var.aval.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            return Accumulated(var, "total", dtype), []
        total = _jax.make_var(var.aval)
        eqn = next(e for e in self.traced.jaxpr.eqns if var in e.outvars)
        made = scaled(eqn, total, 1.0 / self.num_microbatches, var)
        return Accumulated(total, "total", accumulator_dtype(dtype)), made

    def _refusal(self, eqn: JaxprEqn, why: str) -> SplitError:
        return SplitError(
            "HP-SPLIT-SLICE",
            f"`{eqn.primitive.name}` {why}",
            where=_jax.user_frame(eqn),
            details=[f"equation: {describe(eqn)}"],
            ways_out=[
                "num_microbatches=1",
                "write the line with sizes and numbers that a slice of the batch can have: "
                "x.shape[0], or what divides by M",
            ],
        )


def _same(a: Any, b: Any) -> bool:
    left, right = np.asarray(a), np.asarray(b)
    both_nan = left.dtype.kind == "f" and bool(np.all(np.isnan(left) & np.isnan(right)))
    return both_nan or bool(np.array_equal(left, right))
