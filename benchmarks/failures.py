"""What happens when a process of a running step dies or hangs, at random moments.

    python benchmarks/failures.py [--kills 30] [--stops 5] [--out benchmarks/results/failures.json]

Each trial starts a process per group (4, 2 and 1 virtual devices), compiles a small step, runs it
over and over, and sends SIGKILL or SIGSTOP to one of the processes at a moment drawn at random,
from the start of compiling on. Told are the seconds until the driver has a HetpassError, what the
error says, and what is left: processes, listening ports, shared memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import ray

import hetpass as hp
from hetpass.runtime.watchdog import Limits

DEFAULT_OUT = Path(__file__).resolve().parent / "results" / "failures.json"
PLAN = "fast[4](data=2,model=2): 0-1 | slow(data=2): 2-3 | last: 4-5"
SILENT_S = 4.0


def train_step(weights: Any, batch: Any) -> Any:
    def loss_fn(weights: Any) -> jax.Array:
        x = batch["x"]
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def listening_ports(pids: set[int]) -> set[int]:
    """Ports that sockets of these processes listen at."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            ports.add(int(fields[1].split(":")[1], 16))
    return ports


def all_listening() -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def trial(sign: signal.Signals, delay_s: float, victim: int, batch: Any) -> dict[str, Any]:
    """One failure, and what was seen of it."""
    cluster = hp.Cluster.emulated({"fast": 4, "slow": 2, "last": 1})
    workers = hp.Workers(limits=Limits(silent_s=SILENT_S))
    step = hp.het_parallelize(
        train_step, cluster=cluster, num_microbatches=4, plan=PLAN, runtime=workers
    )
    crew = workers.talk(cluster).crew
    pids = set(crew.pids)
    ports = listening_ports(pids)
    struck: list[float] = []

    def strike() -> None:
        time.sleep(delay_s)
        struck.append(time.perf_counter())
        os.kill(crew.pids[victim], sign)

    threading.Thread(target=strike, daemon=True).start()
    weights = [np.eye(64, dtype=np.float32) * 0.1 for _ in range(6)]
    steps = 0
    try:
        while True:
            weights, loss = step(weights, batch)
            float(loss)
            steps += 1
    except hp.HetpassError as error:
        seen_s = time.perf_counter()
        found = error
        if not struck:
            raise
    until_s = time.perf_counter() + 5
    while (any(map(alive, pids)) or ports & all_listening()) and time.perf_counter() < until_s:
        time.sleep(0.02)
    text = str(found)
    return {
        "signal": sign.name,
        "after_s": round(delay_s, 3),
        "steps_before": steps,
        "victim_stage": victim,
        "seconds_to_error": round(seen_s - struck[0], 3),
        "seconds_to_nothing_left": round(time.perf_counter() - struck[0], 3),
        "code": found.code,
        "what": found.what,
        "names_the_stage": f"stage {victim}" in found.where,
        "last_tasks_of_stages": sum(f"stage {s} began last" in text for s in range(3)),
        "processes_left": sorted(filter(alive, pids)),
        "ports_left": sorted(ports & all_listening()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds until the signal")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    batch = {"x": np.ones((32, 64), np.float32), "y": np.zeros((32, 64), np.float32)}
    before = set(os.listdir("/dev/shm"))
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="warning",
    )
    rows = []
    signals = [signal.SIGKILL] * args.kills + [signal.SIGSTOP] * args.stops
    for sign in signals:
        row = trial(sign, draw.uniform(0, args.longest), draw.randrange(3), batch)
        rows.append(row)
        print(
            f"{row['signal']} of stage {row['victim_stage']} after {row['after_s']:5.2f} s "
            f"({row['steps_before']:4d} steps): {row['code']} after "
            f"{row['seconds_to_error']:.2f} s, nothing left after "
            f"{row['seconds_to_nothing_left']:.2f} s, stage named: {row['names_the_stage']}",
            flush=True,
        )
    ray.shutdown()
    left = sorted(set(os.listdir("/dev/shm")) - before)
    result = {
        "machine": {
            "date": datetime.date.today().isoformat(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "ray": ray.__version__,
        },
        "silent_limit_s": SILENT_S,
        "shared_memory_left": left,
        "trials": rows,
    }
    kills = [r["seconds_to_error"] for r in rows if r["signal"] == "SIGKILL"]
    stops = [r["seconds_to_error"] for r in rows if r["signal"] == "SIGSTOP"]
    for name, values in (("killed", kills), ("stopped", stops)):
        if values:
            print(f"{name}: {len(values)}, worst {max(values):.2f} s to the error")
    print(f"shared memory left: {left}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
