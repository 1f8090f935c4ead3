"""A small GPT on text, ready to be trained by the pipeline and by `jax.jit` side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import hetpass as hp
from benchmarks.models import gpt_linen, gpt_nnx
from benchmarks.models.sizes import GPTConfig
from benchmarks.text import TextBatches, standard_library_bytes

CONFIG = GPTConfig(hidden=32, layers=2, heads=2, vocab=256, seq=12)
TEXT = standard_library_bytes(60_000)


@dataclass(frozen=True)
class Training:
    """step: (state, batch) -> (state, metrics). create: key -> state."""

    step: Callable[[Any, Any], Any]
    create: Callable[[jax.Array], Any]
    config: GPTConfig

    def batches(self, size: int = 8, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
        return iter(TextBatches(TEXT, size, self.config.seq, seed))

    def state(self) -> Any:
        return self.create(jax.random.key(0))

    def parallel(self, sizes: dict[str, int], num_microbatches: int, **settings: Any) -> Any:
        """The decorated step on groups of virtual devices, a stage on each."""
        settings.setdefault("plan", "even")
        cluster = hp.Cluster.emulated(sizes)
        return hp.het_parallelize(
            self.step, cluster=cluster, num_microbatches=num_microbatches, **settings
        )


def training(library: str = "linen", optimizer: Any = None, **shape: Any) -> Training:
    config = dataclasses.replace(CONFIG, **shape)
    chosen = optimizer or optax.sgd(0.1)
    if library == "linen":
        create = gpt_linen.make_create_state(config, chosen)
        return Training(gpt_linen.train_step, create, config)
    step = gpt_nnx.make_train_step(config, chosen)
    return Training(step, gpt_nnx.make_create_state(config, chosen), config)
