"""Plans a model for three groups of GPUs that are not here; nothing is allocated or touched."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import sys
from pathlib import Path

import hetpass as hp
from hetpass.tools.models.steps import model_step


def main(name="gpt-2.6B", folder="."):
    cluster = hp.Cluster.from_file(Path(__file__).with_name("mixed.toml"))
    model = model_step(name)
    step = hp.het_parallelize(model.step, cluster=cluster)
    planned = step.trace(model.state, model.batch).plan()
    print(planned.explain())
    planned.plan.save(Path(folder, "plan.json"))
    planned.plot_timeline(Path(folder, "timeline.png"))
    planned.plot_sharding(Path(folder, "sharding.png"))
    return planned


if __name__ == "__main__":
    main(*sys.argv[1:])
