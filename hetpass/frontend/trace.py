"""The pass `trace`: an unmodified step and example arguments -> Traced."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hetpass import _jax
from hetpass.errors import HetpassError, TraceError
from hetpass.frontend.branch_residuals import residuals_apart
from hetpass.frontend.inline import Inlined, inline
from hetpass.frontend.probes import ProbeMismatch, compare
from hetpass.ir.program import InputLeaf, Traced


@dataclass(frozen=True)
class Signature:
    """How a step takes its arguments.

    Attributes:
      batch_argnums: arguments whose arrays have a leading dimension of B examples.
      donate_argnums: arguments that the caller gives away.
      static_argnums: arguments that are part of the program, not arrays.
      batch_axes: exceptions by path, `{"batch['weights']": None, "state.cache": 0}`: the
        dimension of the examples, or None for free of the batch. A path stands for all below it.
    """

    batch_argnums: tuple[int, ...] = (1,)
    donate_argnums: tuple[int, ...] = (0,)
    static_argnums: tuple[int, ...] = ()
    batch_axes: Mapping[str, int | None] = field(default_factory=dict)


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature = Signature(),
    *,
    arg_names: Sequence[str] = (),
) -> Traced:
    """Trace a step at B, 2B and 3B.

    Args:
      fun: the step; called three times with tracers.
      args, kwargs: arrays, scalars or `jax.ShapeDtypeStruct`s.
      signature: which arguments hold the batch, are donated, are static.
      arg_names: of the positional arguments, for messages.

    Raises:
      TraceError: the arguments are no arrays, the batch's leaves disagree in size, the step cannot
        be traced at B, or nothing is to be compiled (`jax_disable_jit`).
    """
    name = getattr(fun, "__name__", type(fun).__name__)
    _check_compiles(fun, name)
    statics = {i: args[i] for i in signature.static_argnums if i < len(args)}
    dynamic = [a for i, a in enumerate(args) if i not in statics]
    argnums = [i for i in range(len(args)) if i not in statics]
    leaves, in_tree = jax.tree_util.tree_flatten_with_path((tuple(dynamic), dict(kwargs)))
    inputs = [_leaf(path, value, argnums, arg_names, signature) for path, value in leaves]
    batch_size = _batch_size(inputs, signature)

    def flat(*values: Any) -> Any:
        positional, keywords = jax.tree_util.tree_unflatten(in_tree, values)
        rest = iter(positional)
        merged = [statics[i] if i in statics else next(rest) for i in range(len(args))]
        return fun(*merged, **keywords)

    first, out_shape = _trace_at(flat, fun, inputs, 1)
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(out_shape)
    probed = _probe(flat, fun, inputs, first, batch_size)
    first = probed.first
    constants = [
        InputLeaf(f"constant {i}", v.aval, None, None, False, _only_zeros(value))
        for i, (v, value) in enumerate(
            zip(first.jaxpr.invars[len(inputs) :], first.constants, strict=True)
        )
    ]
    constants = _constant_axes(constants, first, probed.probes)
    return Traced(
        name=name,
        jaxpr=first.jaxpr,
        probes=tuple(p.jaxpr for p in probed.probes),
        probe_failure=probed.failure,
        probe_place=probed.place,
        probe_function=probed.function,
        probes_agree=probed.agree,
        inputs=(*inputs, *constants),
        constants=first.constants,
        in_tree=in_tree,
        out_tree=out_tree,
        out_paths=tuple("result" + _path_text(path) for path, _ in out_leaves),
        batch_size=batch_size,
        recomputed=first.recomputed,
    )


def _check_compiles(fun: Callable[..., Any], name: str) -> None:
    if jax.config.jax_disable_jit:
        raise TraceError(
            "HP-TRACE-DISABLED",
            f"{name} is to be compiled, and compiling is switched off",
            where=_defined_at(fun),
            details=["jax.config.jax_disable_jit is True (JAX_DISABLE_JIT, or jax.disable_jit())"],
            ways_out=[
                "with jax.disable_jit(False): around the call",
                "call the undecorated step to go through it line by line",
            ],
        )


def abstract(value: Any, path: str = "argument") -> _jax.ShapedArray:
    """The aval of an argument leaf, weak types kept as `jax.jit` does.

    Raises:
      TraceError: the leaf is not an array, a number or a `jax.ShapeDtypeStruct`.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        weak = bool(getattr(value, "weak_type", False))
        dtype = jax.dtypes.canonicalize_dtype(value.dtype) if _plain(value.dtype) else value.dtype
        return _jax.ShapedArray(tuple(value.shape), dtype, weak_type=weak)
    reason: tuple[str, ...] = ()
    try:
        aval = value.aval if lives_elsewhere(value) else jax.typeof(value)
    except (TypeError, ValueError, OverflowError) as error:  # no array; masked; too large a number
        aval, reason = None, (str(error).partition("\n")[0],)
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        raise TraceError(
            "HP-TRACE-ARGUMENT",
            f"{path} is a {type(value).__name__}, which is not an array that JAX takes",
            where=path,
            details=[f"value: {value!r:.80}".replace("\n", " "), *reason],
            ways_out=[
                "pass arrays, numbers, or pytrees of them",
                "name the argument in static_argnums if it is part of the program",
            ],
        )
    return _jax.ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))


def lives_elsewhere(value: Any) -> bool:
    """Whether it is an array of other processes: it knows its aval, and is no `jax.Array`."""
    return hasattr(value, "aval") and not isinstance(value, (jax.Array, jax.core.Tracer))


def _plain(dtype: Any) -> bool:
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def _path_text(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path))


def _leaf(
    path: Sequence[Any],
    value: Any,
    argnums: Sequence[int],
    arg_names: Sequence[str],
    signature: Signature,
) -> InputLeaf:
    if path[0].idx == 0:  # positional
        argnum: int | None = argnums[path[1].idx]
        number = argnums[path[1].idx]
        known = number < len(arg_names)
        text = (arg_names[number] if known else f"args[{number}]") + _path_text(path[2:])
    else:  # by keyword: the same argument as by position
        keyword = str(path[1].key)
        argnum = list(arg_names).index(keyword) if keyword in arg_names else None
        text = keyword + _path_text(path[2:])
    aval = abstract(value, text)
    batch_dim = 0 if argnum in signature.batch_argnums and aval.ndim else None
    batch_dim = _declared_axis(text, aval, batch_dim, signature.batch_axes)
    return InputLeaf(text, aval, argnum, batch_dim, argnum in signature.donate_argnums)


def _declared_axis(
    text: str, aval: Any, default: int | None, axes: Mapping[str, int | None]
) -> int | None:
    matches = [p for p in axes if text == p or (text.startswith(p) and text[len(p)] in "[.")]
    if not matches:
        return default
    axis = axes[max(matches, key=len)]
    if axis is not None and not -aval.ndim <= axis < aval.ndim:
        raise TraceError(
            "HP-TRACE-BATCH-AXIS",
            f"batch_axes says that {text} has its examples along dimension {axis}",
            where=text,
            details=[f"its shape is {tuple(aval.shape)}"],
            ways_out=[f"give a dimension below {aval.ndim}, or None for free of the batch"],
        )
    return None if axis is None else axis % aval.ndim


def _batch_size(inputs: Sequence[InputLeaf], signature: Signature) -> int | None:
    for axis_path in signature.batch_axes:
        if not any(leaf.path.startswith(axis_path) for leaf in inputs):
            raise TraceError(
                "HP-TRACE-BATCH-AXIS",
                f"batch_axes names {axis_path!r}, which is no argument of the step",
                details=["the arguments are " + ", ".join(leaf.path for leaf in inputs[:20])],
                ways_out=["write the path as it is listed above"],
            )
    batched = [leaf for leaf in inputs if leaf.batch_dim is not None]
    sizes = Counter(leaf.aval.shape[leaf.batch_dim] for leaf in batched)
    if len(sizes) > 1:
        usual = sizes.most_common(1)[0][0]
        odd = next(leaf for leaf in batched if leaf.aval.shape[leaf.batch_dim] != usual)
        raise TraceError(
            "HP-TRACE-BATCH-SIZE",
            "the arrays of the batch disagree in the number of examples",
            where=odd.path,
            details=[f"{leaf.path}: {tuple(leaf.aval.shape)}" for leaf in batched[:12]],
            ways_out=[
                f"options=hp.Options(batch_axes={{{odd.path!r}: None}}) if it is free of the batch",
                "batch_axes with the dimension that holds the examples",
                "batch_argnums if another argument is the batch",
            ],
        )
    size = next(iter(sizes), None)
    if size == 0:
        raise TraceError(
            "HP-TRACE-BATCH-SIZE",
            "the batch is empty",
            where=batched[0].path,
            ways_out=["pass at least one example"],
        )
    return size


def _trace_at(
    flat: Callable[..., Any], fun: Callable[..., Any], inputs: Sequence[InputLeaf], scale: int
) -> tuple[Inlined, Any]:
    structs = []
    for leaf in inputs:
        shape = list(leaf.aval.shape)
        if leaf.batch_dim is not None:
            shape[leaf.batch_dim] *= scale
        weak = {"weak_type": True} if leaf.aval.weak_type else {}
        structs.append(jax.ShapeDtypeStruct(tuple(shape), leaf.aval.dtype, **weak))
    try:
        closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(*structs)
    except HetpassError:
        raise
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TraceError(
            "HP-TRACE-STEP",
            f"{getattr(fun, '__name__', type(fun).__name__)} cannot be traced",
            where=_users_line(error) or _defined_at(fun),
            details=[f"{type(error).__name__}: {first_line}"],
            ways_out=[
                "make it run under jax.jit first: jax.jit(step).trace(...) fails in the same place",
                "static_argnums for arguments that steer Python control flow",
            ],
        ) from error
    _check_results(closed, out_shape, fun)
    return inline(closed), out_shape


def _check_results(closed: Any, out_shape: Any, fun: Callable[..., Any]) -> None:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(out_shape)]
    jaxpr, consts = _jax.open_jaxpr(closed)
    shapes = {v for v, c in zip(jaxpr.constvars, consts, strict=True) if _is_shape(c)}
    for path, atom in zip(paths, jaxpr.outvars, strict=True):
        if not isinstance(atom, _jax.Literal) and atom in shapes:
            raise TraceError(
                "HP-TRACE-STEP",
                f"result{_path_text(path)} is a ShapeDtypeStruct, which is no array",
                where=_defined_at(fun),
                ways_out=["return arrays, numbers, or pytrees of them, as for jax.jit"],
            )


def _is_shape(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _users_line(error: BaseException) -> str:
    """`file:line (function)` of the innermost frame outside this package and installed ones."""
    ours = str(Path(__file__).resolve().parent.parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not frame.filename.startswith((ours, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""


def _defined_at(fun: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code else ""


@dataclass(frozen=True)
class _Probed:
    """The programs at B, at 2B and 3B; or why there are no others, at which line, in which function
    of JAX, and whether those at 2B and 3B correspond to each other."""

    first: Inlined
    probes: Sequence[Inlined] = ()
    failure: str = ""
    place: str = ""
    function: str = ""
    agree: bool = False


def _probe(
    flat: Callable[..., Any],
    fun: Callable[..., Any],
    inputs: Sequence[InputLeaf],
    first: Inlined,
    batch_size: int | None,
) -> _Probed:
    if batch_size is None:
        return _Probed(first, failure="the step has no batch", place=_defined_at(fun))
    probes = []
    for scale in (2, 3):
        try:
            probes.append(_trace_at(flat, fun, inputs, scale)[0])
        except TraceError as error:
            reason = error.details[0] if error.details else error.what
            place = f" at {error.where}" if error.where else ""
            why = f"at {scale * batch_size} examples it cannot be traced ({reason}){place}"
            return _Probed(first, failure=why, place=error.where)
    try:
        compare([first.jaxpr, *(p.jaxpr for p in probes)])
    except ProbeMismatch as mismatch:
        apart = [replace(p, jaxpr=residuals_apart(p.jaxpr)) for p in (first, *probes)]
        try:
            compare([p.jaxpr for p in apart])
        except ProbeMismatch:
            place = mismatch.where or _defined_at(fun)
            agree = _correspond(*(p.jaxpr for p in probes))
            return _Probed(first, (), str(mismatch), place, mismatch.function, agree)
        return _Probed(apart[0], apart[1:])
    return _Probed(first, probes)


def _correspond(*jaxprs: Any) -> bool:
    try:
        compare(jaxprs)
    except ProbeMismatch:
        return False
    return True


def _constant_axes(
    constants: Sequence[InputLeaf], first: Inlined, probes: Sequence[Inlined]
) -> list[InputLeaf]:
    """Captured arrays whose size follows the batch (a numpy arange of B) are batched too."""
    if not probes:
        return list(constants)
    start = len(first.jaxpr.invars) - len(constants)
    found = []
    for i, leaf in enumerate(constants):
        larger = probes[0].jaxpr.invars[start + i].aval.shape
        grown = [d for d, (a, b) in enumerate(zip(leaf.aval.shape, larger, strict=True)) if a != b]
        dim = grown[0] if len(grown) == 1 else None
        found.append(replace(leaf, batch_dim=dim))
    return found


def _only_zeros(value: Any) -> bool:
    """Whether a captured array holds zeros only; random keys and parts of arrays never do."""
    if isinstance(value, jax.Array) and not (value.is_fully_addressable and _plain(value.dtype)):
        return False
    return not np.any(np.asarray(value))
