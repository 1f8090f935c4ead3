"""The comparison itself can fail, in every way that it should."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetpass as hp
from tests.equality import GROUPS, MICROBATCHES, chosen_layouts, differences, plan_text
from tests.programs.everything import NUMBERS, PROGRAMS

GOOD = {"a": jnp.array([1.0, 2.0, 3.0]), "n": jnp.int32(4), "key": jax.random.key(0)}


@pytest.mark.parametrize(
    "changed",
    [
        {"a": jnp.array([1.0, 2.0, 3.001])},
        {"a": jnp.array([1.0, 2.0, jnp.nan])},
        {"a": jnp.array([[1.0, 2.0, 3.0]])},
        {"a": jnp.array([1, 2, 3])},
        {"n": jnp.int32(5)},
        {"n": jnp.int16(4)},
        {"key": jax.random.key(1)},
        {"more": jnp.zeros(())},
    ],
)
def test_finds_what_differs(changed):
    assert len(differences(GOOD | changed, GOOD)) == 1
    assert differences(GOOD, GOOD) == []


def test_nan_and_infinity_must_stand_at_the_same_places():
    wild = jnp.array([jnp.nan, jnp.inf, 1.0], jnp.float32)
    assert differences(wild, wild) == []
    assert differences(jnp.array([jnp.nan, -jnp.inf, 1.0], jnp.float32), wild)
    assert differences(jnp.array([0.0, jnp.inf, 1.0], jnp.float32), wild)


def test_weak_types_differ():
    weak = jax.jit(lambda: 1.0)()
    assert weak.weak_type
    assert differences(jnp.float32(1.0), weak)


def test_a_leaf_that_is_zero_mathematically_has_a_floor():
    noise, nothing = {"bias": jnp.full(3, 1e-7, jnp.float32)}, {"bias": jnp.zeros(3)}
    assert differences(noise, nothing)
    assert differences(noise, nothing, zeros=("*['bias']",)) == []
    assert differences({"bias": jnp.full(3, 1e-4, jnp.float32)}, nothing, zeros=("*['bias']",))


@given(layers=st.integers(1, 12), groups=st.sampled_from((1, 2, 3)), seed=st.integers(0, 99),
       rows=st.sampled_from((None, 1, 2, 8)))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_drawn_plan_is_legal(layers, groups, seed, rows):
    text = plan_text(layers, groups, random.Random(seed), rows)
    cluster = hp.Cluster.emulated(GROUPS[groups])
    plan = hp.Plan.parse(text, cluster=cluster, num_layers=layers, num_microbatches=4)
    stages = plan.pipelines[0].stages
    assert [s.replicas[0].group for s in stages] == list(GROUPS[groups])[: min(layers, groups)]
    assert all((rows or 1) % dict(s.replicas[0].mesh)["data"] == 0 for s in stages)


def test_layouts_cover_every_number_of_microbatches_and_groups():
    seen = {layout for p in NUMBERS + PROGRAMS for layout in chosen_layouts(str(p), False)}
    assert {(s.num_microbatches, s.num_groups) for s in seen} == {
        (m, g) for m in MICROBATCHES for g in GROUPS
    }
    assert len(chosen_layouts("any", True)) == 12


def test_every_program_makes_equal_arguments_each_time():
    for program in NUMBERS[::20] + PROGRAMS[::20]:
        one, two = program.make(), program.make()
        for a, b in zip(jax.tree.leaves(one.args), jax.tree.leaves(two.args), strict=True):
            if not jax.dtypes.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(a, b)
