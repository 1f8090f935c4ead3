"""A target as a step that can be traced and planned, with the settings of the command line."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetpass.errors import ToolError
from hetpass.ir.quantities import counted
from hetpass.tools.target import Target, declare_target

if TYPE_CHECKING:
    from hetpass.api import HetParallelized
    from hetpass.ir.cluster import Cluster
    from hetpass.ir.device_profile import DeviceProfile


def declare_step(parser: ArgumentParser, *, optional: bool = False) -> None:
    """The arguments that say which step, and how it is cut."""
    declare_target(parser, optional=optional)
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="default: the number that is found best"
    )
    parser.add_argument("--schedule", metavar="NAME", help="default: the fastest that is found")
    parser.add_argument(
        "--per-microbatch",
        action="store_true",
        help="let batch statistics and routing see one microbatch at a time: another meaning",
    )
    parser.add_argument(
        "--sharding",
        choices=("axes", "solved"),
        help="inside a stage: by mesh axes, or every operation by an integer program, which takes "
        "seconds to minutes; default: axes",
    )


def stepped(
    target: Target,
    cluster: Cluster | None,
    arguments: Namespace,
    observer: Callable[[Any], None] | None = None,
    profile: DeviceProfile | None = None,
    progress: Callable[[int, float], None] | None = None,
    status: Callable[[str], None] | None = None,
) -> HetParallelized:
    """The step under `het_parallelize`; a decorator's settings hold where the line says nothing."""
    from hetpass.api import HetParallelized, het_parallelize

    if arguments.microbatches is not None and arguments.microbatches < 1:
        raise ToolError(
            "HP-TOOL-ARGUMENTS",
            counted(arguments.microbatches, "microbatch"),
            where="--microbatches",
            ways_out=["a whole number of at least 1"],
        )
    given = target.step
    step: HetParallelized = given if isinstance(given, HetParallelized) else het_parallelize(given)
    settings = step.settings
    options = replace(
        settings.options,
        observer=observer or settings.options.observer,
        profile=profile or settings.options.profile,
        progress=progress or settings.options.progress,
        status=status or settings.options.status,
        sharding=arguments.sharding or settings.options.sharding,
    )
    if arguments.per_microbatch:
        options = replace(options, batch_statistics="per_microbatch", routing="per_microbatch")
    settings = replace(
        settings,
        cluster=cluster or settings.cluster,
        num_microbatches=arguments.microbatches or settings.num_microbatches,
        schedule=arguments.schedule or settings.schedule,
        options=options,
    )
    return HetParallelized(step.__wrapped__, settings)  # type: ignore[attr-defined]


def on_this_processor() -> None:
    """Keeps JAX off accelerators in commands that only trace and plan."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
