"""Pictures of memory and of devices, and the notebook's table."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import hetpass as hp
from hetpass.errors import ExecutionError
from hetpass.ir.cluster import Cluster
from hetpass.ir.plan import Plan
from hetpass.pictures.html_table import html_table
from hetpass.pictures.plot_memory import plot_memory
from hetpass.pictures.plot_sharding import plot_sharding


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


@pytest.fixture(scope="module")
def planned():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    cluster = hp.Cluster.emulated({"fast": 2, "slow": 1})
    traced = hp.het_parallelize(step, cluster=cluster).trace(4 * [shape], shape)
    return traced.with_plan("fast: 0-2 | slow: 3", num_microbatches=4)


@pytest.mark.parametrize("name", ["plot_timeline", "plot_memory", "plot_sharding"])
def test_pictures_of_a_planned_step(planned, tmp_path, name):
    path = tmp_path / "picture.png"
    figure = getattr(planned, name)(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    drawn = [axis.get_title(loc="left") for axis in figure.axes]
    drawn += [label.get_text() for axis in figure.axes for label in axis.get_yticklabels()]
    assert any("fast" in text for text in drawn)


def test_every_amount_of_memory_has_the_unit_that_suits_it(planned):
    axis = planned.plot_memory().axes[0]
    drawn = [text.get_text() for text in axis.texts]
    assert all(" KiB of " in text and " GiB, " in text for text in drawn), drawn
    assert "KiB" in axis.get_xlabel()


@pytest.mark.parametrize(("limit", "unit"), [(3e12, "TiB"), (3e9, "GiB")])
def test_the_axis_of_memory_reaches_to_the_limits_unless_they_are_far(limit, unit):
    def stage(held):
        return SimpleNamespace(group="a", devices=1, fixed_bytes=held, activation_bytes=held / 2,
                               limit_bytes=limit, in_flight=1)  # fmt: skip

    near = plot_memory([stage(0.3 * limit), stage(0.001 * limit)]).axes[0]
    assert unit in near.get_xlabel()
    assert near.get_xlim()[1] * 2.0 ** (40 if unit == "TiB" else 30) > limit
    far = plot_memory([stage(0.001 * limit)]).axes[0]
    assert "far beyond" in far.get_xlabel()
    assert max(bar.get_width() for bar in far.patches) > 0.4 * far.get_xlim()[1]


def test_reprs_are_one_line(planned):
    assert repr(planned.traced) == "<Traced step: 45 equations, batch 8>".replace(
        "45", str(len(planned.traced.program.jaxpr.eqns))
    )
    assert repr(planned) == "<Planned step: 4 layers on 2 stages, 4 microbatches, schedule 1f1b>"
    inside = [planned.traced.program, planned.layered.program, planned.layered, planned.facts]
    staged = planned.traced.settings.passes.partition(planned.layered, planned.plan)
    for value in (*inside, staged, planned.timeline(), planned.traced.plan().search):
        text = repr(value)
        assert text.startswith(f"<{type(value).__name__}")
        assert "\n" not in text
        assert len(text) < 100


def test_notebooks_show_a_table(planned):
    html = planned._repr_html_()
    assert html.count("<tr>") == 3
    assert "<td>fast[2]</td>" in html


def test_names_are_never_markup():
    html = html_table("<script>", ("a",), (("<img src=x onerror=y>",),), "</pre><b>")
    assert "<script>" not in html
    assert "<img" not in html
    assert "&lt;/pre&gt;" in html


def test_every_device_is_drawn_and_idle_ones_are_said():
    cluster = Cluster.emulated({"a": 4, "b": 3})
    plan = Plan.parse(
        "a[2](model=2): 0 | b[2]: 1", cluster=cluster, num_layers=2, num_microbatches=2
    )
    figure = plot_sharding(plan, cluster)
    texts = [[text.get_text() for text in axis.texts] for axis in figure.axes]
    assert texts == [
        ["0 · model 0", "0 · model 1", "idle", "idle"],
        ["1 · data 0", "1 · data 1", "idle"],
    ]


def test_without_matplotlib_a_picture_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    cluster = Cluster.emulated({"a": 1})
    plan = Plan.parse("a: 0", cluster=cluster, num_layers=1, num_microbatches=1)
    with pytest.raises(ExecutionError) as refusal:
        plot_sharding(plan, cluster)
    assert refusal.value.code == "HP-RUN-PLOT"
