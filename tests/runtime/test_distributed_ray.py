"""Workers as processes that Ray starts: the same step over two groups, and what is left behind.

Starting Ray takes seconds, so that everything here shares one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetpass as hp
from hetpass.errors import ExecutionError
from hetpass.ir.cluster import Cluster, DeviceGroup
from hetpass.runtime.distributed.workers import WorkerOptions
from hetpass.runtime.watchdog import Limits
from tests.equality import relative_error
from tests.runtime import test_distributed as others

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'hetpass[ray]'")

# Ray forks and leaves sockets to the collector; what it warns of is Ray's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PLAN = "fast[4](data=2,model=2): 0-1 | slow(data=2): 2-3"


def train_step(weights, batch):
    def loss_fn(weights):
        x = batch["x"]
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), {"loss": loss}


def evaluate(weights, batch):
    x = batch["x"]
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def create(key):
    return [0.2 * jax.random.normal(k, (16, 16)) for k in jax.random.split(key, 4)]


def batches(count):
    draw = np.random.default_rng(0)
    return [
        {name: draw.normal(size=(16, 16)).astype(np.float32) for name in "xy"} for _ in range(count)
    ]


def start(options=None, hosts=1):
    kind = Cluster.emulated({"any": 1}).groups[0].kind
    fast = DeviceGroup("fast", kind, hosts, 4 // hosts, inter_host=kind.link)
    cluster = Cluster((fast, DeviceGroup("slow", kind, 1, 2)), default_link=kind.link)
    workers = hp.Workers(options=options or WorkerOptions(limits=Limits(silent_s=30)))
    step = hp.het_parallelize(
        train_step, cluster=cluster, num_microbatches=4, plan=PLAN, runtime=workers
    )
    return step, workers


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=20.0):
    until_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.05)
    return condition()


def check_equal(step):
    first, *rest = batches(4)
    state = step.init_state(create, jax.random.key(1), batch=first)
    expected, jitted = create(jax.random.key(1)), jax.jit(train_step)
    for batch in (first, *rest):
        state, metrics = step(state, batch)
        expected, wanted = jitted(expected, batch)
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    for value, other in zip(hp.fetch(state), expected, strict=True):
        assert relative_error(value, other) < 1e-5
    found = step.companion(evaluate)(state, first)
    assert float(found) == pytest.approx(float(evaluate(expected, first)), rel=1e-5)
    return state


def test_processes_give_what_the_step_gives_and_end():
    before = set(os.listdir("/dev/shm"))
    step, workers = start()
    with workers:
        state = check_equal(step)
        compiled = step.compiled_for(state, batches(1)[0])
        _, timeline = compiled.timeline(state, batches(1)[0])
        assert [len(tasks) for tasks in timeline.order()] == [8, 8]
        pids = workers.talk(step.settings.cluster).crew.pids
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
    assert wait_for(lambda: not any(map(alive, pids)))
    assert not ray.is_initialized()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.fixture(scope="module")
def running():
    """A Ray that several tests share; on the loopback interface, as Workers start it."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("transport", ["jax", "ray"])
def test_other_transports(transport):
    step, workers = start(WorkerOptions(transport=transport, limits=Limits(silent_s=30)))
    with workers:
        check_equal(step)


@pytest.mark.usefixtures("running")
def test_a_group_of_two_hosts():
    step, workers = start(hosts=2)
    with workers:
        check_equal(step)
        # A state from the driver, with keys, is placed over both.
        whole = hp.het_parallelize(
            others.train_step,
            cluster=step.settings.cluster,
            num_microbatches=4,
            plan="fast[4](data=2,model=2): 0-3 | slow(data=2): 4-5",
            runtime=workers,
        )
        batch = next(others.batches(1))
        state, metrics = whole(others.create(jax.random.key(1)), batch)
        expected, wanted = jax.jit(others.train_step)(others.create(jax.random.key(1)), batch)
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
        key = jax.random.key_data(hp.fetch(state["key"]))
        np.testing.assert_array_equal(key, jax.random.key_data(expected["key"]))


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_an_error_and_nothing_is_left(sign):
    step, workers = start(WorkerOptions(limits=Limits(silent_s=5.0)))
    batch = batches(1)[0]
    state, metrics = step(create(jax.random.key(1)), batch)
    float(metrics["loss"])
    pids = workers.talk(step.settings.cluster).crew.pids
    os.kill(pids[1], sign)
    with pytest.raises(ExecutionError) as caught:
        for _ in range(10_000):
            state, metrics = step(state, batch)
            float(metrics["loss"])
    assert caught.value.code == {9: "HP-RUN-LOST", 19: "HP-RUN-SILENT"}[sign]
    assert caught.value.where == "stage 1"
    assert "stage 0 began last" in str(caught.value)
    assert wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.usefixtures("running")
def test_a_step_that_fails_in_a_worker_says_why():
    """The worker's own error arrives, not that the others lost their connections."""

    def failing(weights, batch):
        if os.environ["JAX_PLATFORMS"] == "cpu" and jax.device_count() == 2:
            raise RuntimeError("only where there are two devices")
        return train_step(weights, batch)

    _, workers = start()
    with workers:
        cluster = start()[0].settings.cluster
        step = hp.het_parallelize(
            failing, cluster=cluster, num_microbatches=4, plan=PLAN, runtime=workers
        )
        with pytest.raises(hp.HetpassError, match="only where there are two devices"):
            step(create(jax.random.key(1)), batches(1)[0])


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us without
import jax, numpy as np
import hetpass as hp
from tests.runtime import test_distributed_ray as here

step, workers = here.start()
state, batch = here.create(jax.random.key(1)), here.batches(1)[0]
state, metrics = step(state, batch)
float(metrics["loss"])
print(*workers.talk(step.settings.cluster).crew.pids, flush=True)
while True:
    state, metrics = step(state, batch)
    float(metrics["loss"])
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_driver(sign):
    top = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(top)}
    driver = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=top,
    )
    with driver:
        try:
            pids = [int(word) for word in driver.stdout.readline().split()]
            assert len(pids) == 2
            driver.send_signal(sign)
            driver.wait(30)
            assert wait_for(lambda: not any(map(alive, pids)), 30)
        finally:
            driver.kill()  # leaving the block waits for it
