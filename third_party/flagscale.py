"""FlagScale's heterogeneous training configuration: layers, meshes and device types.

    hetero_pipeline_layer_split: [6, 2, 4]       layers of every pipeline stage
    hetero_process_meshes: [2, 1, 1, 1, 1, …]    per mesh: tensor, context, expert, data, pipeline
    hetero_device_types: ["A800", "BI150"]       per mesh

A mesh of pipeline size p has p stages, each with data · tensor devices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from third_party.stages import ReadStage, as_plan, group_of_kind, refuse

_KEYS = ("hetero_pipeline_layer_split", "hetero_process_meshes", "hetero_device_types")
_PER_MESH = 5


def read_settings(path: str | Path) -> dict[str, Any]:
    """The three lists in a YAML or JSON file, wherever they stand in it.

    Only `key: [ … ]` on one line is read: no YAML library, and so no tags, is involved.
    """
    text = Path(path).read_text(encoding="utf-8")
    found = {}
    for key in (*_KEYS, "micro_batch_size", "global_batch_size"):
        match = re.search(rf'"?{key}"?\s*[:=]\s*(\[[^\]]*\]|\d+)', text)
        if match:
            value = re.sub(r"(?<=[\[, ])([A-Za-z][\w-]*)(?=[\], ])", r'"\1"', match[1])
            found[key] = json.loads(value.replace("'", '"'))
    return found


def read_plan(
    settings: Mapping[str, Any], cluster: Cluster, num_microbatches: int | None = None
) -> Plan:
    """The plan that a configuration says; layers are transformer layers, embedding and head apart.

    Args:
      num_microbatches: None: global over micro batch size and the first mesh's data parallelism.

    Raises:
      PlanError: HP-PLAN-FOREIGN, a key is missing, or expert or context parallelism is used.
    """
    for key in _KEYS:
        if key not in settings:
            raise refuse(f"{key!r} is missing", "configuration")
    split, flat, types = (settings[key] for key in _KEYS)
    if flat and isinstance(flat[0], list):
        flat = [number for mesh in flat for number in mesh]
    meshes = [flat[i : i + _PER_MESH] for i in range(0, len(flat), _PER_MESH)]
    stages = []
    end = 0
    layers = iter(split)
    for number, (mesh, kind) in enumerate(zip(meshes, types, strict=True)):
        tensor, context, expert, data, depth = mesh
        where = f"hetero_process_meshes[{number}]"
        if context != 1 or expert != 1:
            raise refuse("context and expert parallelism cannot be said here", where)
        group = group_of_kind(cluster, kind, where)
        for _ in range(depth):
            end += next(layers, 0)
            stages.append(ReadStage(end, group, data, tensor))
    if num_microbatches is None:
        examples = settings.get("micro_batch_size", 1) * meshes[0][3]
        num_microbatches = max(1, settings.get("global_batch_size", examples) // examples)
    return as_plan(stages, cluster, num_microbatches, "configuration")
