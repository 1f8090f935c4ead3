"""GPT sizes by name, and Alpa's count of floating-point operations. No JAX here.

The table from 125M to 76B is the GPT suite of Alpa (OSDI'22): sequence 1024, vocabulary 51200,
rematerialization on. `tiny` is a byte-level model that two CPU cores train in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a decoder-only transformer, and how it is computed.

    Attributes:
      hidden, layers, heads, vocab, seq: sizes; `heads` divides `hidden`.
      tied: the output projection is the token embedding.
      dropout: rate after the embedding, the attention and the MLP; 0 turns it off.
      remat: recompute each block in the backward pass.
      scan: one `lax.scan` over stacked blocks instead of one block after the other.
      dtype, param_dtype: of the computation and of the parameters, by name.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int = 51200
    seq: int = 1024
    tied: bool = True
    dropout: float = 0.0
    remat: bool = False
    scan: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.layers, self.heads, self.vocab, self.seq)
        if min(sizes) < 1:
            raise ValueError(f"every size of a GPT is at least 1: {sizes}")
        if self.hidden % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a hidden size of {self.hidden}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"a dropout rate is in [0, 1): {self.dropout}")


def _alpa(hidden: int, layers: int, heads: int) -> GPTConfig:
    return GPTConfig(hidden=hidden, layers=layers, heads=heads, remat=True)


GPT_SIZES: dict[str, GPTConfig] = {
    "tiny": GPTConfig(hidden=64, layers=4, heads=4, vocab=256, seq=64),
    "125M": _alpa(768, 12, 12),
    "350M": _alpa(1024, 24, 16),
    "760M": _alpa(1536, 24, 16),
    "1.3B": _alpa(2048, 24, 32),
    "2.6B": _alpa(2560, 32, 32),
    "6.7B": _alpa(4096, 32, 32),
    "15B": _alpa(5120, 48, 40),
    "39B": _alpa(8192, 48, 64),
    "76B": _alpa(10240, 60, 80),
}


def parameter_count(config: GPTConfig) -> int:
    """Parameters of the model: weights, biases, norms and both embeddings."""
    h = config.hidden
    block = 12 * h * h + 13 * h
    embeddings = (config.vocab + config.seq) * h
    head = 0 if config.tied else config.vocab * h
    return config.layers * block + embeddings + 2 * h + head


def alpa_step_flops(config: GPTConfig, batch: int) -> float:
    """Floating-point operations of one training step, counted as Alpa reports them.

    (24 + 48 + 24 remat) B S H^2 L (1 + S / (6 H)) + 6 B S H V: forward 24, backward 48, forward
    again if rematerialized; the last term is the output projection.
    """
    b, s, h = batch, config.seq, config.hidden
    per_block = (24 + 48 + 24 * config.remat) * b * s * h**2 * (1 + s / (6 * h))
    return per_block * config.layers + 6.0 * b * s * h * config.vocab
