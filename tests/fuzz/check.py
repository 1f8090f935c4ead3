"""Runs a case both ways and judges: equal, refused by name, wrong, or crashed."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

import hetpass as hp
from hetpass.frontend.microbatch import split
from hetpass.frontend.trace import Signature, trace
from hetpass.ir.verify import verify
from tests.equality import GROUPS, differences, plan_text
from tests.frontend.evaluate import evaluate
from tests.fuzz.case import Case

FLOAT64_TOLERANCE = 1e-9
FLOAT64_FLOOR = 1e-11
BFLOAT16_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
      verdict: "equal", "refused", "wrong" or "crash".
      text: what differs, the refusal, or the traceback's end.
    """

    verdict: str
    text: str = ""


Runner = Callable[[Case, tuple[Any, Any]], Any]


def check(case: Case, run: Runner) -> Outcome:
    """Judge the results of `run` against `jax.jit`.

    A leaf that is off may be zero mathematically, with rounding noise left: then the case is run
    again in float64, where noise is ten orders of magnitude below any mistake. In bfloat16 only
    such leaves may be off; in float32 what float64 says holds for all.
    """
    try:
        expected, actual = _both(case, run, "float32")
        found = differences(actual, expected, case.precision)
        if case.precision == "bfloat16":
            found = [d for d in found if not d.relative <= BFLOAT16_TOLERANCE]
        if found:
            exact, noise = _in_float64(case, run)
            coarse = [d for d in found if case.precision == "bfloat16" and d.path not in noise]
            found = coarse + exact
    except hp.HetpassError as refusal:
        return _judge_refusal(refusal)
    except Exception:
        return Outcome("crash", traceback.format_exc(limit=-4))
    return Outcome("wrong", "; ".join(map(str, found))[:2000]) if found else Outcome("equal")


def _both(case: Case, run: Runner, dtype: str) -> tuple[Any, Any]:
    """The results of jax.jit and of `run`; of strong types, which other tests compare."""
    results = jax.jit(case.step)(*case.args(dtype)), run(case, case.args(dtype))
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), results)


def _in_float64(case: Case, run: Runner) -> tuple[list[Any], set[str]]:
    """Differences of leaves that are not zero, and the paths of those that are, but for noise."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        expected, actual = _both(case, run, "float64")
        found = differences(actual, expected, "float64", tolerance=FLOAT64_TOLERANCE)
        leaves = jax.tree_util.tree_leaves_with_path(expected)
        noise = {
            jax.tree_util.keystr(path)
            for (path, leaf), other in zip(leaves, jax.tree.leaves(actual), strict=True)
            if _is_noise(leaf, other)
        }
        return [d for d in found if d.path not in noise], noise
    finally:
        jax.config.update("jax_enable_x64", before)


def _is_noise(expected: Any, actual: Any) -> bool:
    if not jax.numpy.issubdtype(expected.dtype, jax.numpy.inexact):
        return False
    sizes = [np.abs(np.asarray(x)).max(initial=0) for x in (expected, actual)]
    return max(sizes) <= FLOAT64_FLOOR


def _judge_refusal(refusal: hp.HetpassError) -> Outcome:
    text = str(refusal)
    named = ".py:" in text and bool(refusal.ways_out) and bool(refusal.code)
    return Outcome("refused" if named else "crash", text)


# ---------------------------------------------------------------------------------------------
# Two ways to run: the frontend's program alone, and the whole pipeline


def frontend(case: Case, args: tuple[Any, Any]) -> Any:
    """split, and the definition of its result, compiled part by part."""
    signature = Signature(batch_axes=case.batch_axes)
    traced = trace(case.step, args, {}, signature, arg_names=("state", "batch"))
    program = split(traced, case.num_microbatches)
    verify(program)
    return jax.tree.unflatten(traced.out_tree, evaluate(program, args, compiled=True))


def whole(case: Case, args: tuple[Any, Any]) -> Any:
    """The compiled pipeline, on a random plan."""
    step = hp.het_parallelize(
        case.step,
        cluster=hp.Cluster.emulated(GROUPS[case.num_groups]),
        num_microbatches=case.num_microbatches,
        options=hp.Options(batch_axes=case.batch_axes),
        donate_argnums=(),
    )
    traced = step.trace(*args)
    num_layers = traced.plan().layered.num_layers
    rows = (traced.program.batch_size or 1) // case.num_microbatches
    text = plan_text(num_layers, case.num_groups, random.Random(case.seed), rows)
    return traced.with_plan(text).compile()(*args)
