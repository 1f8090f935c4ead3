"""A Plan: every decision about a step, as plain data that travels as JSON. No JAX.

The planner writes it, a person may write it, and everything after the planner obeys it. In JSON:

    {"format": "hetpass-plan/1", "schedule": "1f1b", "fingerprint": null, "predictions": {},
     "pipelines": [{"num_microbatches": 8, "stages": [
       {"first_layer": 0, "last_layer": 13, "replicas": [
         {"group": "fast", "devices": [0, 1, 2, 3], "mesh": [["data", 2], ["model", 2]]}]}, …]}]}

Stages of one pipeline may share a submesh (equal devices and mesh): they are run interleaved.

As one line of text: "fast[4](data=2,model=2): 0-13 | slow: 14-24" (see plan_text.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpass.ir.cluster import Cluster
from hetpass.ir.frozen import Frozen
from hetpass.ir.plan_text import check_place, parse_stages, range_text, stages_text
from hetpass.ir.quantities import counted, span_text, spelled
from hetpass.ir.records import at, nearest, shown
from hetpass.ir.schedule import read_tasks
from hetpass.ir.stage_plan import (
    READER,
    Pipeline,
    Replica,
    Sharding,
    StagePlan,
    parts,
    pipeline_data,
    read_pipeline,
)

__all__ = ["Pipeline", "Plan", "Replica", "Sharding", "StagePlan"]

RULED_AXES = ("data", "model")
"""Mesh axes that stages without shardings of their own are cut along."""

FORMAT = "hetpass-plan/1"


@dataclass(frozen=True)
class Plan:
    """All decisions for one step.

    Attributes:
      pipelines: parallel pipelines; their microbatches add up to M.
      schedule: the name of a schedule; "auto": one is chosen when the plan is bound to a program.
      tasks: per lane (submesh), the order of tasks, "F0.0 F0.1 B0.0 …" (kind, stage, microbatch);
        () where the schedule's name and the in-flight counts of the stages say it all.
      fingerprint: of the program that the plan was made for; None: any program with as many layers.
      predictions: what the planner expected, by name with the unit in the name ("step_s": 0.31).

    Raises:
      PlanError: HP-PLAN-…, with the path of the value that is wrong.
    """

    pipelines: tuple[Pipeline, ...]
    schedule: str = "1f1b"
    fingerprint: str | None = None
    predictions: Mapping[str, float] = field(default_factory=dict, hash=False)
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        with at("pipelines"):
            pipelines = parts(self.pipelines, Pipeline)
        with at("schedule"):
            READER.text(self.schedule)
        if self.fingerprint is not None:
            with at("fingerprint"):
                READER.text(self.fingerprint)
        with at("predictions"):
            predictions = READER.values(self.predictions, READER.number)
        with at("tasks"):
            object.__setattr__(self, "tasks", READER.items(self.tasks, _checked_tasks))
        object.__setattr__(self, "pipelines", pipelines)
        object.__setattr__(self, "predictions", Frozen(sorted(predictions.items())))

    @property
    def num_microbatches(self) -> int:
        """M: over all pipelines."""
        return sum(pipeline.num_microbatches for pipeline in self.pipelines)

    @property
    def num_stages(self) -> int:
        """S: over all pipelines."""
        return sum(len(pipeline.stages) for pipeline in self.pipelines)

    @property
    def num_layers(self) -> int:
        """L: of the first pipeline, which `check` holds against the program and the others."""
        return self.pipelines[0].num_layers

    @property
    def lane_of(self) -> tuple[int, ...]:
        """Per stage of the first pipeline, its lane: stages on one submesh share it."""
        lanes: dict[tuple[Replica, ...], int] = {}
        return tuple(
            lanes.setdefault(stage.replicas, len(lanes)) for stage in self.pipelines[0].stages
        )

    @property
    def lane_names(self) -> tuple[str, ...]:
        """Per lane of the first pipeline, what people call it: "0 · fast[4]"."""
        names: dict[int, str] = {}
        for lane, stage in zip(self.lane_of, self.pipelines[0].stages, strict=True):
            places = " + ".join(f"{r.group}[{len(r.devices)}]" for r in stage.replicas)
            names.setdefault(lane, f"{lane} · {places}")
        return tuple(names.values())

    def _replicas(self) -> Iterator[tuple[str, Replica]]:
        """Every replica with its path."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for r, replica in enumerate(stage.replicas):
                    yield f"pipelines[{p}].stages[{s}].replicas[{r}]", replica

    # -- against a cluster and a program ------------------------------------------------------

    def check(
        self,
        cluster: Cluster,
        num_layers: int,
        fingerprint: str | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Holds the plan against what it is to be used with.

        Args:
          cluster: whose groups the plan names.
          num_layers: L of the program.
          fingerprint: of the program; None is not compared.
          batch_size: B; every microbatch, and each data axis's share of it, must come out whole.

        Raises:
          PlanError: HP-PLAN-FINGERPRINT, -LAYERS, -GROUP, -DEVICES, -AXIS, -MICROBATCHES or
            -BATCH.
        """
        check_place(cluster, num_layers)
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            READER.refuse(
                "FINGERPRINT",
                "the plan was made for another program",
                "fingerprint",
                details=[f"plan {shown(self.fingerprint)}, program {shown(fingerprint)}"],
                ways_out=[
                    "plan this program anew",
                    "set the plan's fingerprint to null if the layers still mean the same",
                ],
            )
        for index, pipeline in enumerate(self.pipelines):
            if pipeline.num_layers != num_layers:
                READER.refuse(
                    "LAYERS",
                    f"the plan's stages hold {counted(pipeline.num_layers, 'layer')}, the "
                    "program has "
                    f"{num_layers}",
                    f"pipelines[{index}].stages[{len(pipeline.stages) - 1}].last_layer",
                    ways_out=[f"let the last stage end at layer {num_layers - 1}"],
                )
        self._check_devices(cluster)
        self._check_axes()
        if batch_size is not None:
            self._check_batch(batch_size)

    def _check_axes(self) -> None:
        """An axis that nothing is cut along is a slip: its devices would all do the same."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                if any(assignment is not None for assignment in stage.assignments):
                    continue
                cut = {axis for dims in stage.shardings.values() for dim in dims for axis in dim}
                for r, replica in enumerate(stage.replicas):
                    for name, size in replica.mesh:
                        if size > 1 and name not in (*RULED_AXES, *cut):
                            READER.refuse(
                                "AXIS",
                                f"nothing is cut along the mesh axis {shown(name)}",
                                f"pipelines[{p}].stages[{s}].replicas[{r}].mesh",
                                details=["its devices would all compute the same"],
                                ways_out=[
                                    *nearest(name, RULED_AXES),
                                    "data: examples, model: parameters",
                                    "name it in the stage's shardings",
                                ],
                            )

    def _check_devices(self, cluster: Cluster) -> None:
        sizes = {group.name: group.num_devices for group in cluster.groups}
        users: dict[tuple[str, int], tuple[str, Replica]] = {}
        for path, replica in self._replicas():
            if replica.group not in sizes:
                READER.refuse(
                    "GROUP",
                    f"the cluster has no group {shown(replica.group)}",
                    f"{path}.group",
                    ways_out=nearest(replica.group, sizes),
                )
            size = sizes[replica.group]
            for device in replica.devices:
                if device >= size:
                    READER.refuse(
                        "DEVICES",
                        f"the group {replica.group!r} has no device {device}",
                        f"{path}.devices",
                        details=[f"it has the devices 0 to {size - 1}"],
                    )
                user, other = users.setdefault((replica.group, device), (path, replica))
                if user != path and not (_one_pipeline(user, path) and other == replica):
                    READER.refuse(
                        "DEVICES",
                        f"device {device} of {replica.group!r} is used twice",
                        f"{path}.devices",
                        details=[f"by {user} too"],
                        ways_out=[
                            "give every stage devices of its own",
                            "interleave: stages of one pipeline may share a whole submesh, with "
                            "equal devices and mesh",
                        ],
                    )

    def _check_batch(self, batch_size: int) -> None:
        count = self.num_microbatches
        if batch_size % count:
            legal = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
            near = sorted(sorted(legal, key=lambda d: (abs(d - count), d))[:3])
            READER.refuse(
                "MICROBATCHES",
                f"a batch of {batch_size} cannot be cut into {count} equal microbatches",
                "num_microbatches",
                ways_out=[f"nearest legal numbers of microbatches: {', '.join(map(str, near))}"],
            )
        share = batch_size // count
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                if stage.assignments:
                    continue  # its axes cut what its assignments say, examples or not
                ways = sum(replica.axis_size("data") for replica in stage.replicas)
                if len(stage.replicas) == 1 and share % ways:
                    READER.refuse(
                        "BATCH",
                        f"{counted(share, 'example')} of a microbatch cannot be shared by a data "
                        "axis of "
                        f"{ways}",
                        f"pipelines[{p}].stages[{s}].replicas[0].mesh",
                        details=[f"batch {batch_size} / {counted(count, 'microbatch')} = {share}"],
                        ways_out=[
                            "legal sizes of the data axis: "
                            + ", ".join(str(d) for d in range(1, share + 1) if share % d == 0)
                        ],
                    )

    # -- text ---------------------------------------------------------------------------------

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        cluster: Cluster,
        num_layers: int,
        num_microbatches: int,
        schedule: str = "1f1b",
    ) -> Plan:
        """The plan of one pipeline in one line: "fast[4](data=2,model=2): 0-13 | slow: 14-24".

        Raises:
          PlanError: with the position of the character, and what would be legal there.
        """
        stages = parse_stages(text, cluster, num_layers)
        return cls((Pipeline(stages, num_microbatches),), schedule)

    def to_text(self) -> str:
        """The inverse of `parse`: layers and submeshes; the schedule is no part of it.

        Raises:
          PlanError: HP-PLAN-TEXT, the plan says more than the one line can.
        """
        stages = self.pipelines[0].stages
        more = [
            len(self.pipelines) > 1 and "several pipelines",
            any(s.shardings for s in stages) and "shardings",
            any(s.recompute != "none" for s in stages) and "recomputation",
        ]
        if any(more):
            READER.refuse(
                "TEXT",
                f"one line of text cannot hold {', '.join(m for m in more if m)}",
                ways_out=["save the plan as JSON"],
            )
        return stages_text(stages)

    def __str__(self) -> str:
        head = (
            f"plan: {counted(self.num_layers, 'layer')}, {counted(self.num_stages, 'stage')}, "
            f"{counted(self.num_microbatches, 'microbatch')}, schedule {self.schedule}"
        )
        rows = [("stage", "layers", "group", "devices", "mesh", "")]
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for replica in stage.replicas:
                    rows.append(
                        (
                            str(s) if len(self.pipelines) == 1 else f"{p}.{s}",
                            span_text(stage.first_layer, stage.last_layer),
                            replica.group,
                            range_text(replica.devices),
                            " ".join(f"{name}={size}" for name, size in replica.mesh),
                            _notes(stage),
                        )
                    )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += [f"  predicted {_predicted(*item)}" for item in self.predictions.items()]
        return "\n".join([head, *lines])

    # -- JSON ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """JSON text; equal plans give equal bytes."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "schedule": self.schedule,
            "fingerprint": self.fingerprint,
            "predictions": dict(self.predictions),
            "pipelines": [pipeline_data(pipeline) for pipeline in self.pipelines],
        }
        if self.tasks:
            data["tasks"] = list(self.tasks)
        return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in a JSON text. Nothing in it is ever executed."""
        return cls._from_data(READER.parse(READER.text(text), ".json"))

    @classmethod
    def _from_data(cls, data: Any) -> Plan:
        fields = READER.record(
            data,
            required=("format", "pipelines"),
            optional=("schedule", "fingerprint", "predictions", "tasks"),
        )
        if fields["format"] != FORMAT:
            READER.refuse(
                "FORMAT",
                f"the format {shown(fields['format'])} is not read here",
                "format",
                ways_out=[f"this version reads {FORMAT!r}"],
            )
        with at("pipelines"):
            pipelines = READER.items(fields["pipelines"], read_pipeline)
        rest = {k: v for k, v in fields.items() if k not in ("format", "pipelines")}
        return cls(pipelines, **rest)

    def save(self, path: str | Path) -> None:
        """Writes the plan as a JSON file."""
        READER.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a `.json` file."""
        data = READER.load(path, (".json",))
        with at(f"{path}:"):
            return cls._from_data(data)


def _one_pipeline(first: str, second: str) -> bool:
    """Whether two paths of replicas lie in one pipeline."""
    return first.split(".")[0] == second.split(".")[0]


def _checked_tasks(line: Any) -> str:
    text = READER.text(line)
    try:
        read_tasks(text)
    except ValueError as fault:
        READER.refuse("TASKS", str(fault), ways_out=['write tasks as "F0.0 F0.1 B0.0"'])
    return text


def _predicted(name: str, value: float) -> str:
    """ "step_s" is in seconds, as the names of all numbers say their units."""
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')}: {spelled(value, 'time', 4)}"
    return f"{name}: {value:.4g}"


def _notes(stage: StagePlan) -> str:
    notes = []
    if stage.recompute != "none":
        notes.append(f"recompute {stage.recompute}")
    if stage.in_flight is not None:
        notes.append(f"in flight {stage.in_flight}")
    if stage.shardings:
        notes.append(f"{len(stage.shardings)} shardings")
    return ", ".join(notes)
