"""`verify`: one call of a step both ways, by `het_parallelize` and by `jax.jit`, leaf by leaf.

For users, on small instances: the whole step runs on one device too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from hetpass.api import HetParallelized, het_parallelize
from hetpass.checks import checked_tolerance, checked_type
from hetpass.errors import ExecutionError, TraceError
from hetpass.ir.plan import Plan
from hetpass.ir.quantities import counted
from hetpass.tree_difference import tree_difference

Verdict = Literal["equal", "noise", "differs"]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Of the norm of the difference over the norm of the leaf, by type; exact for all others."""

_NOISE = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}


@dataclass(frozen=True, repr=False)
class LeafComparison:
    """One leaf of the results. Prints as one line.

    Attributes:
      path: of the leaf, "result[1]['loss']".
      dtype, shape: of `jax.jit`'s result.
      relative: norm of the difference over the norm of the leaf, over entries that are finite in
        `jax.jit`'s; infinite where NaN or infinities stand at other places.
      absolute: largest difference of an entry.
      verdict: "equal" within the tolerance; "noise": beyond it, but both are no larger than
        rounding leaves where a value is zero mathematically; "differs".
      note: why it differs, where numbers do not say it.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    relative: float
    absolute: float
    verdict: Verdict
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """As text: path, type, relative and absolute difference, verdict."""
        kind = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        verdict = self.verdict + (f": {self.note}" if self.note else "")
        return self.path, kind, f"{self.relative:.1e}", f"{self.absolute:.1e}", verdict

    def __str__(self) -> str:
        path, kind, relative, absolute, verdict = self.cells
        return f"{path}: {kind}, {verdict}, relative {relative}, absolute {absolute}"

    def __repr__(self) -> str:
        return f"<LeafComparison {self}>"


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `verify` found. Prints as a table; true if no leaf differs.

    Attributes:
      name: of the step.
      plan: that it ran with.
      leaves: in the order of the result.
    """

    name: str
    plan: Plan
    leaves: tuple[LeafComparison, ...]

    @property
    def equal(self) -> bool:
        return all(leaf.verdict != "differs" for leaf in self.leaves)

    @property
    def worst(self) -> LeafComparison | None:
        """The leaf that differs most; None for a step without results."""
        order = ("noise", "equal", "differs")
        return max(
            self.leaves, key=lambda leaf: (order.index(leaf.verdict), leaf.relative), default=None
        )

    def __bool__(self) -> bool:
        return self.equal

    @property
    def _head(self) -> str:
        leaves = counted(len(self.leaves), "leaf", "leaves")
        differing = sum(leaf.verdict == "differs" for leaf in self.leaves)
        return f"{self.name} against jax.jit, M = {self.plan.num_microbatches}: " + (
            f"{leaves}, {differing} of them different" if differing else f"{leaves}, all equal"
        )

    def __str__(self) -> str:
        rows = [("leaf", "type", "relative", "absolute", ""), *(leaf.cells for leaf in self.leaves)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join([self._head, *(_line(row, widths) for row in rows)])

    def __repr__(self) -> str:
        return f"<Comparison {self._head}>"

    def raise_if_different(self) -> None:
        """Raises:
        ExecutionError: HP-RUN-DIFFERS, some leaf differs.
        """
        if self.equal:
            return
        raise ExecutionError(
            "HP-RUN-DIFFERS",
            f"{self.name} does not equal jax.jit",
            where=self.worst.path if self.worst else "",
            details=str(self).splitlines()[:40],
            ways_out=[
                "if the step was run with a per-microbatch meaning, that is another result",
                "compare in float64 (jax_enable_x64): rounding shrinks, a mistake does not",
                "otherwise report it, with the step: a result that differs is a fault of hetpass",
            ],
        )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    path, kind, relative, absolute, verdict = row
    left = f"  {path:{widths[0]}}  {kind:{widths[1]}}"
    return f"{left}  {relative:>{widths[2]}}  {absolute:>{widths[3]}}  {verdict}".rstrip()


def verify(
    step: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    **settings: Any,
) -> Comparison:
    """Run a step as a pipeline and as one program, and compare every leaf of the results.

    Args:
      step: a function of arrays, or what `het_parallelize` made of one, whose settings then hold.
      args, kwargs: of the step; nothing is donated. The step must fit one device.
      tolerance: relative, instead of 1e-12, 1e-5, 1e-2 for float64, float32, bfloat16.
      settings: of `het_parallelize` (plan, cluster, num_microbatches, options, …), for a step
        that is a plain function. The plan is "even" if none is given, a stage on each group: the
        search might leave groups idle, and so compare less.

    Raises:
      HetpassError: the step is refused.
    """
    checked_tolerance(tolerance)
    checked_type(kwargs, Mapping, "kwargs", "a mapping of keyword arguments")
    if isinstance(step, HetParallelized):
        if settings:
            raise TraceError(
                "HP-TRACE-OPTION",
                f"the step was decorated: its own settings hold, not {', '.join(settings)}",
                where="settings",
                ways_out=["pass the function that was decorated", "leave the settings out"],
            )
        parallel = step.without_donation()
    else:
        parallel = het_parallelize(step, **{"plan": "even", **settings, "donate_argnums": ()})
    keywords = dict(kwargs or {})
    compiled = parallel.compiled_for(*args, **keywords)
    actual = compiled(*args, **keywords)
    return Comparison(
        parallel.__name__,
        compiled.planned.plan,
        compare(actual, parallel.jitted()(*args, **keywords), tolerance),
    )


def compare(
    actual: Any, expected: Any, tolerance: float | None = None
) -> tuple[LeafComparison, ...]:
    """Two results of one structure, leaf by leaf.

    Raises:
      ExecutionError: HP-RUN-STRUCTURE, they are of different structures.
    """
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        raise ExecutionError(
            "HP-RUN-STRUCTURE",
            "the results are of different structures",
            details=tree_difference(
                jax.tree.structure(actual), jax.tree.structure(expected), ("one", "other")
            ),
            ways_out=["compare results of one step"],
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True)
    return tuple(
        _compare_leaf("result" + jax.tree_util.keystr(path), a, e, tolerance)
        for (path, e), a in pairs
    )


def _compare_leaf(path: str, actual: Any, expected: Any, tolerance: float | None) -> LeafComparison:
    dtype, shape = str(expected.dtype), tuple(expected.shape)
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        note = f"{actual.dtype}{list(actual.shape)} instead of {dtype}{list(shape)}"
        return LeafComparison(path, dtype, shape, math.inf, math.inf, "differs", note)
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, e = (np.asarray(x).astype(wide) for x in (actual, expected))
    finite = np.isfinite(e)
    if (
        not np.array_equal(a[~finite], e[~finite], equal_nan=True)
        or not np.isfinite(a[finite]).all()
    ):
        note = "NaN or infinities at other places"
        return LeafComparison(path, dtype, shape, math.inf, math.inf, "differs", note)
    gap = np.abs(a[finite] - e[finite])
    absolute = float(gap.max(initial=0))
    size = float(np.linalg.norm(e[finite]))
    relative = float(np.linalg.norm(gap)) / size if size else (math.inf if absolute else 0.0)
    bound = TOLERANCE.get(dtype, 0.0) if tolerance is None else tolerance
    inexact = jax.numpy.issubdtype(expected.dtype, jax.numpy.inexact)
    largest = max(float(np.abs(x[finite]).max(initial=0)) for x in (a, e))
    verdict: Verdict = "equal" if relative <= bound else "differs"
    if verdict == "differs" and inexact and largest <= _NOISE.get(dtype, 0.0):
        verdict = "noise"
    return LeafComparison(path, dtype, shape, relative, absolute, verdict)
