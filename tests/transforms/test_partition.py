from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from hetpass.transforms.partition import partition
from tests.transforms.build import Example, layered, plan, random_tree
from tests.transforms.interpreter import assert_equal, run

BATCH, WIDTH = 8, 24


def check(example: Example, *sizes: int, num_microbatches: int):
    staged = partition(layered(example, num_microbatches), plan(*sizes, num_microbatches=num_microbatches))
    expected = jax.tree.leaves(example.reference(example.state, example.batch))
    actual = run(staged, jax.tree.leaves((example.state, example.batch)))
    assert_equal(actual, expected)
    return staged


def mlp(num_layers: int = 4) -> Example:
    shapes = {f"w{k}": (WIDTH, WIDTH) for k in range(num_layers)}
    batch = {"x": random_tree((BATCH, WIDTH), 1), "y": random_tree((BATCH, WIDTH), 2)}

    def loss(params, x, y):
        h = x
        for k in range(num_layers):
            with jax.named_scope(f"layer{k}"):
                h = jnp.tanh(h @ params[f"w{k}"])
                if k == num_layers - 1:
                    return jnp.sum((h - y) ** 2) / BATCH

    def region(whole, rows, offset):
        value, grads = jax.value_and_grad(loss)(whole["state"], rows["x"], rows["y"])
        return {"loss": value, **{f"d{k}": g for k, g in grads.items()}}

    def epilogue(state, batch, pro, totals):
        new = {k: w - 0.1 * totals[f"d{k}"] for k, w in state.items()}
        return new, {"loss": totals["loss"]}

    return Example(random_tree(shapes), batch, region, epilogue, num_layers)


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 1, 1)])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_chain_of_layers(sizes, num_microbatches):
    staged = check(mlp(), *sizes, num_microbatches=num_microbatches)
    assert len(staged.pairs) == 4
