"""Sailor (SOSP 2025): plans as rows of stages and replicas; profiles of layers.

    {"microbatch": 4, "global_batch": 1024, "stages": [
       {"layers": [0, 7], "replicas": [{"device": "GH-96", "tensor_parallel": 4}, …]}, …]}

Equal replicas of one kind become one mesh of data and tensor parallelism. Profiles in the layout of
`hetpass.ir.profile` are read by `ModelProfile.read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from third_party.stages import ReadStage, as_plan, group_of_kind, refuse


def read_plan(row: Mapping[str, Any], cluster: Cluster) -> Plan:
    """The plan of a row.

    Raises:
      PlanError: HP-PLAN-FOREIGN, the replicas of a stage are of unlike kinds or widths.
    """
    stages = []
    for number, stage in enumerate(row["stages"]):
        where = f"stages[{number}]"
        kinds = {(r["device"], r["tensor_parallel"]) for r in stage["replicas"]}
        if len(kinds) > 1:
            raise refuse("replicas of unlike kinds or widths", where)
        ((device, ways),) = kinds
        group = group_of_kind(cluster, device, where)
        stages.append(ReadStage(stage["layers"][1], group, len(stage["replicas"]), ways))
    data = len(row["stages"][0]["replicas"])
    count = max(1, row["global_batch"] // (row["microbatch"] * data))
    return as_plan(stages, cluster, count, "row")
