"""Alpa (OSDI 2022) and HARP (EuroSys 2026): the stages that a search found.

As JSON, with the names of Alpa's manual stage option:

    {"forward_stage_layer_ids": [[0, 1], [2, 3]], "submesh_physical_shapes": [[1, 2], [1, 2]],
     "submesh_logical_shapes": [[2, 1], [1, 2]], "num_micro_batches": 16}

or in a log, as lines "Result forward_stage_layer_ids: […]", "Result mesh_shapes: […]" and
"Result logical_mesh_shapes: […]"; HARP's mesh shapes carry the number of the sub-cluster:
[(0, (1, 2)), (1, (1, 1))].
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from third_party.stages import ReadStage, as_plan, refuse

_LINES = {
    "forward_stage_layer_ids": "forward_stage_layer_ids",
    "mesh_shapes": "submesh_physical_shapes",
    "logical_mesh_shapes": "submesh_logical_shapes",
}


def read_solution(text: str) -> dict[str, Any]:
    """The solution in a JSON text or a log; of several in a log the last."""
    if text.lstrip().startswith("{"):
        return dict(json.loads(text))
    found: dict[str, Any] = {}
    for name, key in _LINES.items():
        lines = re.findall(rf"Result {name}: (\[.*\])", text)
        if lines:
            found[key] = ast.literal_eval(lines[-1])
    return found


def read_plan(solution: dict[str, Any], cluster: Cluster, num_microbatches: int = 0) -> Plan:
    """The plan of a solution. Alpa's first logical axis is data, the second tensor parallelism.

    Without numbers of sub-clusters stages take groups in order, as long as one has devices left.

    Raises:
      PlanError: HP-PLAN-FOREIGN, lists are missing or of unequal lengths, or devices run out.
    """
    names = tuple(_LINES.values())
    for name in names:
        if name not in solution:
            raise refuse(f"{name!r} is missing", "solution")
    layers, physical, logical = (solution[name] for name in names)
    if not len(layers) == len(physical) == len(logical):
        raise refuse("lists of unequal lengths", "solution")
    left = {group.name: group.num_devices for group in cluster.groups}
    stages = []
    for number, (ids, shape, mesh) in enumerate(zip(layers, physical, logical, strict=True)):
        where = f"stage {number}"
        data, model = mesh
        if isinstance(shape[1], (list, tuple)):
            group = cluster.groups[shape[0]].name
        else:
            fitting = [name for name, free in left.items() if free >= data * model]
            if not fitting:
                raise refuse("no group has devices left", where)
            group = fitting[0]
        left[group] -= data * model
        stages.append(ReadStage(max(ids) + 1, group, data, model))
    count = num_microbatches or int(solution.get("num_micro_batches", 1))
    return as_plan(stages, cluster, count, "solution")
