"""What people pass to the public functions, checked where it is passed."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from hetpass.errors import ClusterError, ExecutionError, PlanError, TraceError
from hetpass.ir.cluster import Cluster
from hetpass.ir.records import shown
from hetpass.tree_difference import call_text

_MOST_OF_A_SIGNATURE = 300


def checked_function(value: Any, where: str = "its first argument") -> Callable[..., Any]:
    """A step.

    Raises:
      TraceError: HP-TRACE-FUNCTION.
    """
    if callable(value):
        return value  # type: ignore[no-any-return]
    raise TraceError(
        "HP-TRACE-FUNCTION",
        f"a step is a function of arrays, not {shown(value)}",
        where=where,
        ways_out=["@hp.het_parallelize over a function of arrays", "hp.het_parallelize(step, ...)"],
    )


def checked_call(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> None:
    """Refuses a call that leaves parameters of a step out, or has others than the step.

    Raises:
      TraceError: HP-TRACE-CALL, with the step's signature.
    """
    try:  # what a wrapper says of the function inside may not hold for the wrapper
        signature = inspect.signature(fun, follow_wrapped=False)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            "HP-TRACE-CALL",
            f"{name} cannot be called so: {error}",
            where=f"{name}{signature}"[:_MOST_OF_A_SIGNATURE],
            details=[f"called with {call_text(args, kwargs)}"],
            ways_out=[
                "pass what the step's own signature names",
                *(
                    [f"decorate the method of the object: het_parallelize(self.{name})"]
                    if "self" in signature.parameters
                    else []
                ),
            ],
        ) from None


def checked_cluster(value: Any) -> Cluster:
    """Raises:
    ClusterError: HP-CLUSTER-TYPE.
    """
    if isinstance(value, Cluster):
        return value
    raise ClusterError(
        "HP-CLUSTER-TYPE",
        f"cluster is a {type(value).__name__}",
        where="cluster",
        ways_out=['hp.Cluster.from_file("cluster.toml")', "hp.Cluster.emulated({...})"],
    )


def checked_count(value: Any) -> int | Literal["auto"]:
    """A number of microbatches.

    Raises:
      PlanError: HP-PLAN-MICROBATCHES.
    """
    if isinstance(value, str) and value == "auto":
        return "auto"
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise PlanError(
            "HP-PLAN-MICROBATCHES",
            f"num_microbatches is {shown(value)}",
            where="num_microbatches",
            ways_out=["a whole number of at least 1", '"auto"'],
        )
    return count


def checked_positions(value: Any, name: str) -> tuple[int, ...]:
    """Positions of arguments: one, or several.

    Raises:
      TraceError: HP-TRACE-ARGNUMS.
    """
    values: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in values):
        raise TraceError(
            "HP-TRACE-ARGNUMS",
            f"{name} is {shown(value)}",
            where=name,
            ways_out=["positions of arguments, from 0"],
        )
    return values


def checked_batch_axes(value: Any) -> Mapping[str, int | None]:
    """Raises:
    TraceError: HP-TRACE-BATCH-AXIS.
    """

    def legal(path: Any, axis: Any) -> bool:
        return isinstance(path, str) and (
            axis is None or (isinstance(axis, int) and not isinstance(axis, bool))
        )

    if isinstance(value, Mapping) and all(legal(*item) for item in value.items()):
        return value
    raise TraceError(
        "HP-TRACE-BATCH-AXIS",
        "batch_axes has an entry that is no dimension by path"
        if isinstance(value, Mapping)
        else f"batch_axes is {shown(value)}",
        where="Options.batch_axes",
        details=[f"{k!r:.60}: {v!r:.60}" for k, v in value.items() if not legal(k, v)]
        if isinstance(value, Mapping)
        else [],
        ways_out=['a dimension by path, or None: {"batch[\'rng\']": None, "state.cache": 0}'],
    )


def checked_float_type(value: Any) -> str | None:
    """The name of a floating-point type.

    Raises:
      TraceError: HP-TRACE-OPTION.
    """
    if value is None:
        return None
    try:
        dtype = jax.numpy.dtype(value)
    except TypeError:
        dtype = np.dtype(bool)
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        raise _no_option("accumulate_dtype", value, ['"float32"', '"float64"'])
    return str(dtype)


def checked_devices(value: Any) -> Sequence[jax.Device] | None:
    """Raises:
    TraceError: HP-TRACE-OPTION.
    """
    if value is None or (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(hasattr(device, "device_kind") for device in value)
    ):
        return value
    raise _no_option("devices", value, ["jax.devices()", "a list of some of them"])


def checked_hook(value: Any, name: str) -> None:
    """Raises:
    TraceError: HP-TRACE-OPTION, what should be called cannot be.
    """
    if value is not None and not callable(value):
        raise _no_option(name, value, ["a function", "None"])


def checked_type(value: Any, sort: type | tuple[type, ...], name: str, way: str) -> None:
    """Raises:
    TraceError: HP-TRACE-OPTION, a setting of another type.
    """
    if value is not None and not isinstance(value, sort):
        raise _no_option(name, value, [way])


def checked_tolerance(value: Any) -> float | None:
    """Raises:
    TraceError: HP-TRACE-OPTION.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None or (number and math.isfinite(value) and value >= 0):
        return value  # type: ignore[no-any-return]
    raise _no_option("tolerance", value, ["a number of zero or more, 1e-5", "None"])


def _no_option(name: str, value: Any, ways_out: Sequence[str]) -> TraceError:
    return TraceError("HP-TRACE-OPTION", f"{name} is {shown(value)}", where=name, ways_out=ways_out)


def created_state(create_fn: Any, args: Sequence[Any]) -> Any:
    """The shapes of the state that a function creates.

    Raises:
      ExecutionError: HP-RUN-INIT, it is no function, or cannot be traced.
    """
    try:
        return jax.eval_shape(checked_function(create_fn, "create_fn"), *args)
    except TraceError as error:
        reason, cause = error.what, None
    except Exception as error:
        first_line = str(error).strip().splitlines()[:1]
        reason, cause = ": ".join([type(error).__name__, *first_line]), error
    raise ExecutionError(
        "HP-RUN-INIT",
        "the function that creates the state cannot be traced",
        where=getattr(create_fn, "__name__", "create_fn"),
        details=[reason],
        ways_out=["step.init_state(create, *args, batch=batch), where create(*args) is the state"],
    ) from cause


def refuse_tracers(name: str, tree: Any) -> None:
    """Raises:
    ExecutionError: HP-RUN-TRACED, called under a JAX transformation.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise ExecutionError(
            "HP-RUN-TRACED",
            f"{name} was called under jax.jit, jax.grad or another transformation",
            details=["it is a compiled pipeline, as a jitted and compiled function is"],
            ways_out=[
                "call it with arrays, outside of the transformation",
                "differentiate inside the step, and decorate the step",
            ],
        )
