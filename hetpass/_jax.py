"""The only door to the parts of JAX that move between versions.

Everything that hetpass takes from `jax.extend`, `jax.interpreters`, `jax._src` or `jaxlib` comes
through here, each name with the versions in which it was seen to differ. Supported: jax 0.10.2 up
to, not including, 0.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax._src import source_info_util as _source_info_util  # private in 0.10 to 0.12
from jax._src.linear_util import DebugInfo as _DebugInfo  # private; a Jaxpr without one warns
from jax._src.tree_util import equality_errors_pytreedef  # private in 0.10 to 0.12
from jax.core import ShapedArray
from jax.extend.core import (  # there since 0.4.36
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    check_jaxpr,
)
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as _pe  # dce_jaxpr; 0.10 to 0.12

try:  # by 0.12 scan keeps its argument groups in a FlatTree; absent in 0.10
    from jax._src import flattree as _flattree
except ImportError:
    _flattree = None

# By 0.12 ClosedJaxpr and Jaxpr are one class.
Atom: TypeAlias = Var | Literal

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])


def make_var(aval: Any) -> Var:
    """A fresh variable. (0.10: `Var(aval, initial_qdd, final_qdd)`; 0.12: `Var(aval)`.)"""
    return Var(aval)


def make_jaxpr_value(
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    constvars: Sequence[Var] = (),
) -> Jaxpr:
    """An open jaxpr; its effects are those of its equations."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    debug_info = _DebugInfo("hetpass", "<fragment>", None, None)
    return Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, debug_info)


def open_jaxpr(value: Any) -> tuple[Jaxpr, tuple[Any, ...]]:
    """The open jaxpr and the constants of a Jaxpr or ClosedJaxpr (one class by 0.12)."""
    consts = tuple(getattr(value, "consts", ()) or ())
    return getattr(value, "jaxpr", value), consts


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def nested_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, open: bodies, branches, what combines elements."""
    values = (v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,)))
    return [open_jaxpr(value)[0] for value in values if is_jaxpr(value)]


def holds(eqn: JaxprEqn, is_such: Callable[[JaxprEqn], bool]) -> bool:
    """Whether it is such an equation, or has one inside."""
    return is_such(eqn) or any(
        holds(inner, is_such) for jaxpr in nested_jaxprs(eqn) for inner in jaxpr.eqns
    )


_INSTALLED = re.compile(
    r"[/\\](site|dist)-packages[/\\]|" + re.escape(str(Path(__file__).parent) + os.sep)
)


def user_frame(eqn: JaxprEqn) -> str:
    """`file:line:column (function)` of the user's own code that made the equation; may be empty.

    That is the innermost frame outside of JAX, hetpass and installed packages (a loss of optax is
    named by the line that calls it), or outside of JAX where there is no other.
    """
    frames = list(_source_info_util.user_frames(eqn.source_info.traceback))
    own = [f for f in frames if not _INSTALLED.search(f.file_name)] or frames
    return str(_source_info_util._summarize_frame(own[0])) if own else ""


def name_stack(eqn: JaxprEqn) -> str:
    return str(eqn.source_info.name_stack)


def library_function(eqn: JaxprEqn) -> str:
    """The function of JAX that the user's line called, "poisson" or "logsumexp"; "" if none is
    known (a call that was traced before keeps no frames of it)."""
    traceback = eqn.source_info.traceback  # innermost frame first, in 0.10 to 0.12
    frames = list(traceback.frames) if traceback is not None else []
    users = (i for i, f in enumerate(frames) if _source_info_util.is_user_filename(f.file_name))
    for frame in reversed(frames[: next(users, 0)]):
        name = frame.function_name
        if "<locals>" in name or name.startswith("_"):  # wrappers around the function
            continue
        return name if "." not in name else ""
    return ""


# ---------------------------------------------------------------------------------------------
# Equations that hold jaxprs


def make_eqn(
    eqn: JaxprEqn,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    params: dict[str, Any] | None = None,
) -> JaxprEqn:
    """The equation with other operands, results and parameters; its source is kept.

    Effects of a nested scan or cond are recomputed by JAX from the jaxpr, so they are kept too.
    """
    new = eqn.params if params is None else params
    return eqn.replace(invars=list(invars), outvars=list(outvars), params=new)


def with_name_prefix(eqn: JaxprEqn, caller: JaxprEqn) -> JaxprEqn:
    """The equation of an inlined call, its name stack prefixed with the caller's.

    Library code that JAX traced once and keeps has no line of the user's: it gets the caller's.
    """
    outer = caller.source_info.name_stack
    inner = eqn.source_info.name_stack
    info = eqn.source_info.replace(name_stack=outer + inner)
    if _source_info_util.user_frame(eqn.source_info.traceback) is None:
        info = info.replace(traceback=caller.source_info.traceback)
    return eqn.replace(source_info=info)


def expanded(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an operation of a higher order (`searchsorted` and others since 0.12) stands for.

    None for any other equation. Its equations have the place of the operation.
    """
    if eqn.primitive.name != "call_hi_primitive":
        return None
    operation = eqn.params["_prim"]

    def run(*operands: Any) -> list[Any]:
        return jax.tree.leaves(operation.expand(*jax.tree.unflatten(operation.in_tree, operands)))

    closed = jax.make_jaxpr(run)(*(atom.aval for atom in eqn.invars))
    eqns = [inner.replace(source_info=eqn.source_info) for inner in closed.jaxpr.eqns]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))


def with_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """The equation with one more, innermost name on its stack: a mark that survives rewriting."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def close(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> Any:
    """What JAX expects as the `jaxpr` parameter of scan, cond and while."""
    return ClosedJaxpr(jaxpr, list(consts))


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan.

    0.10 and 0.11: parameters `num_consts`, `num_carry`; by 0.12: groups of `ft_in`.
    """
    if "ft_in" in eqn.params:
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_params(
    eqn: JaxprEqn,
    body: Any,
    *,
    length: int,
    num_consts: int,
    num_carry: int,
    num_xs: int,
    num_ys: int,
) -> dict[str, Any]:
    """The parameters of `eqn` (a scan) for another body, length and argument groups."""
    params = dict(eqn.params, jaxpr=body, length=length)
    if "ft_in" in params:
        nones, pack = _flattree.nones, _flattree.pack
        params["ft_in"] = pack((nones(num_consts), nones(num_carry), nones(num_xs)))
        params["ft_out"] = pack((nones(num_carry), nones(num_ys)))
    else:
        params["num_consts"], params["num_carry"] = num_consts, num_carry
        if "linear" in params:  # gone in 0.10.2
            params["linear"] = (False,) * (num_consts + num_carry + num_xs)
    return params


# ---------------------------------------------------------------------------------------------
# Running


def bind_equation(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The equation's results, evaluated (or traced) as `jax.core.eval_jaxpr` does it.

    `Primitive.get_bind_params` gives call-like primitives the form in which they are bound, in
    0.10 to 0.12; name stacks are relative to the enclosing jaxpr.
    """
    stack = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    context = _source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    with context, eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def with_weak_type(value: Any, weak: bool) -> Any:
    """The array or tracer, weakly typed or not. (`lax.convert_element_type` cannot say it; the
    primitive's parameters are the same in 0.10 to 0.12.)"""
    if getattr(value, "weak_type", False) == weak:  # PRNG key arrays have no weak types
        return value
    return jax.lax.convert_element_type_p.bind(
        value, new_dtype=value.dtype, weak_type=weak, sharding=None
    )


def zero_keys(shape: Sequence[int], dtype: Any) -> jax.Array:
    """PRNG keys of zero bits. (`_impl` of the key type is private in 0.10 to 0.12; `key_impl`
    takes keys only.)"""
    keys = jax.ShapeDtypeStruct(tuple(shape), dtype)
    data = jax.eval_shape(jax.random.key_data, keys)
    return jax.random.wrap_key_data(jax.numpy.zeros(data.shape, data.dtype), impl=dtype._impl)


def key_impl_of(dtype: Any) -> Any:
    """The PRNG implementation of a key type, as `wrap_key_data` takes it. (See `zero_keys`.)"""
    return dtype._impl


def shard_arrays(array: jax.Array) -> list[jax.Array]:
    """The single-device arrays of an addressable array, in the order of its device assignment.

    `addressable_shards` says the same ten times slower, and `addressable_data` gives shard 0 for
    every index of a replicated array. `_arrays` is private in 0.10 to 0.12.
    """
    return list(array._arrays)  # type: ignore[attr-defined]


def device_order(sharding: Any) -> tuple[Any, ...]:
    """The devices of a sharding in the order of `shard_arrays` (private in 0.10 to 0.12)."""
    return tuple(sharding._addressable_device_assignment)


def drop_dead_code(
    jaxpr: Jaxpr, used_outputs: Sequence[bool], kept_inputs: Sequence[bool]
) -> tuple[Jaxpr, list[bool]]:
    """`jaxpr` restricted to some outputs, and which of its inputs are left.

    Dead code inside calls, scans and branches goes too. (`pe.dce_jaxpr`, 0.10 to 0.12; 0.12 has
    one more optional argument.)
    """
    return _pe.dce_jaxpr(jaxpr, list(used_outputs), instantiate=list(kept_inputs))


def jaxpr_fault(jaxpr: Jaxpr) -> str:
    """What JAX's own checker has against a jaxpr, "" if nothing.

    Variables read before they are bound or bound twice, and equations whose results are not of
    the types that their rules give.
    """
    try:
        check_jaxpr(jaxpr)
    except Exception as error:  # JaxprTypeError, or whatever a rule raises on wrong operands
        return str(error).split("while checking jaxpr", 1)[0].strip() or type(error).__name__
    return ""


def define_identity(
    primitive: Primitive,
    *,
    impl: Callable[..., Any],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
) -> None:
    """Rules of a primitive that returns its one operand (jax.interpreters in 0.10 to 0.12)."""
    primitive.def_impl(impl)
    primitive.def_abstract_eval(impl)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])


# ---------------------------------------------------------------------------------------------
# Shardy, in the stock jaxlib (jaxlib.mlir in 0.10 to 0.12)


@dataclass(frozen=True)
class LoweredOperation:
    """An operation of a lowered program, as plain data.

    Attributes:
      name: "stablehlo.dot_general".
      operands, results: numbers of values.
      rule: (factor sizes, operand factors, result factors, reduction, need-replication and
        permutation factors); None if Shardy has none.
      callee: the function that a call runs.
      bodies: of control flow.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: tuple[Any, ...] | None
    callee: str | None
    bodies: tuple[LoweredBody, ...]


@dataclass(frozen=True)
class LoweredBody:
    """A function, or the body of an operation of control flow."""

    arguments: tuple[int, ...]
    operations: tuple[LoweredOperation, ...]
    returned: tuple[int, ...]


def sharding_rules_of(module: Any) -> tuple[dict[str, LoweredBody], dict[int, tuple[int, ...]]]:
    """(function name -> its operations with their sharding rules, value -> shape).

    Values are numbered over the whole module.
    """
    from jaxlib.mlir import passmanager

    with module.context:
        passes = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        passmanager.PassManager.parse(passes).run(module.operation)
        reader = _ModuleReader()
        found = {
            str(function.attributes["sym_name"]).strip('"'): reader.body(function.regions[0])
            for function in module.body.operations
            if list(function.regions) and list(function.regions[0].blocks)
        }
    return found, reader.shapes


class _ModuleReader:
    """Numbers values; reads operations as plain data."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}

    def value(self, value: Any) -> int:
        if value not in self.numbers:
            self.numbers[value] = len(self.numbers)
            shape = getattr(value.type, "shape", None)
            if shape is None and "tensor" in str(value.type):
                from jaxlib.mlir import ir

                shape = ir.RankedTensorType(value.type).shape
            self.shapes[self.numbers[value]] = tuple(shape or ())
        return self.numbers[value]

    def body(self, region: Any) -> LoweredBody:
        block = region.blocks[0]
        arguments = tuple(map(self.value, block.arguments))
        operations = list(block.operations)
        return LoweredBody(
            arguments,
            tuple(self.operation(op.operation) for op in operations[:-1]),
            tuple(map(self.value, operations[-1].operation.operands)),
        )

    def operation(self, op: Any) -> LoweredOperation:
        from jaxlib.mlir.dialects import sdy

        rule = None
        if "sdy.sharding_rule" in op.attributes:
            rule = _plain_rule(sdy, op.attributes["sdy.sharding_rule"])
        callee = str(op.attributes["callee"]).lstrip("@") if "callee" in op.attributes else None
        flow = op.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if")
        return LoweredOperation(
            op.name,
            tuple(map(self.value, op.operands)),
            tuple(map(self.value, op.results)),
            rule,
            callee,
            tuple(self.body(region) for region in op.regions) if flow else (),
        )


def _plain_rule(sdy: Any, attribute: Any) -> tuple[Any, ...]:
    rule = sdy.OpShardingRuleAttr(attribute)

    def factors(mappings: Any) -> tuple[Any, ...]:
        return tuple(
            tuple(
                tuple(sdy.DimMappingAttr(dim).factor_indices)
                for dim in sdy.TensorMappingAttr(value).dim_mappings
            )
            for value in mappings
        )

    return (
        tuple(rule.factor_sizes),
        factors(rule.operand_mappings),
        factors(rule.result_mappings),
        frozenset(rule.reduction_factors),
        frozenset(rule.need_replication_factors),
        frozenset(rule.permutation_factors),
    )
