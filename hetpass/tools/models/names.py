"""The models that the command line knows by name, and their sizes. No JAX here.

Sizes of GPT, MoE and Wide-ResNet are those of Alpa's benchmark suites (Zheng et al., OSDI 2022), of
LLaMA those published with the models (Touvron et al., 2023; Llama 3, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TransformerSize:
    """A decoder.

    Attributes:
      hidden, layers, heads: sizes; `heads` divides `hidden`.
      vocabulary, sequence: tokens.
      feedforward: width of the MLP; 0: 4 · hidden.
      key_heads: heads of keys and values; 0: as many as `heads`.
      experts: of every second layer's MLP; 0: none.
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 1024
    feedforward: int = 0
    key_heads: int = 0
    experts: int = 0


@dataclass(frozen=True)
class ResNetSize:
    """A wide residual network on images of 224 · 224.

    Attributes:
      blocks: bottleneck blocks in each of the four groups.
      channels: of the first group; each further one has twice as many.
      width: factor of the 3 · 3 convolutions.
    """

    blocks: tuple[int, int, int, int]
    channels: int
    width: int


_50, _101 = (3, 4, 6, 3), (3, 4, 23, 3)


def _moe(hidden: int, layers: int, experts: int) -> TransformerSize:
    return TransformerSize(hidden, layers, 16, 32000, 1024, 8 * hidden, experts=experts)


SIZES: Mapping[str, TransformerSize | ResNetSize] = MappingProxyType(
    {
        "gpt-tiny": TransformerSize(64, 4, 4, 256, 64),
        "gpt-125M": TransformerSize(768, 12, 12),
        "gpt-350M": TransformerSize(1024, 24, 16),
        "gpt-760M": TransformerSize(1536, 24, 16),
        "gpt-1.3B": TransformerSize(2048, 24, 32),
        "gpt-2.6B": TransformerSize(2560, 32, 32),
        "gpt-6.7B": TransformerSize(4096, 32, 32),
        "gpt-15B": TransformerSize(5120, 48, 40),
        "gpt-39B": TransformerSize(8192, 48, 64),
        "gpt-76B": TransformerSize(10240, 60, 80),
        "llama-tiny": TransformerSize(64, 4, 4, 256, 64, 160, 2),
        "llama-7B": TransformerSize(4096, 32, 32, 32000, 2048, 11008, 32),
        "llama-8B": TransformerSize(4096, 32, 32, 128256, 2048, 14336, 8),
        "llama-30B": TransformerSize(6656, 60, 52, 32000, 2048, 17920, 52),
        "llama-70B": TransformerSize(8192, 80, 64, 128256, 2048, 28672, 8),
        "moe-tiny": TransformerSize(64, 2, 4, 256, 64, 128, experts=4),
        "moe-380M": _moe(768, 8, 8),
        "moe-690M": _moe(768, 8, 16),
        "moe-1.3B": _moe(768, 16, 16),
        "moe-2.4B": _moe(1024, 16, 16),
        "moe-7.1B": _moe(1280, 16, 32),
        "moe-10B": _moe(1536, 16, 32),
        "moe-27B": _moe(2048, 16, 48),
        "moe-70B": _moe(2048, 32, 64),
        "moe-140B": _moe(2048, 32, 128),
        "wresnet-tiny": ResNetSize((1, 1, 1, 1), 16, 2),
        "wresnet-250M": ResNetSize(_50, 160, 2),
        "wresnet-500M": ResNetSize(_50, 224, 2),
        "wresnet-1B": ResNetSize(_50, 320, 2),
        "wresnet-2B": ResNetSize(_50, 448, 2),
        "wresnet-4B": ResNetSize(_50, 640, 2),
        "wresnet-6.8B": ResNetSize(_50, 320, 16),
        "wresnet-13B": ResNetSize(_101, 320, 16),
    }
)
"""By name."""

BATCH_SIZES: Mapping[str, int] = MappingProxyType(
    {"gpt": 1024, "llama": 256, "moe": 1024, "wresnet": 1536}
)
"""Examples in a step by family, where nothing else is said; the tiny ones have 32."""


def default_batch_size(name: str) -> int:
    """Examples in a step of the model called `name`."""
    family, _, size = name.partition("-")
    return 32 if size == "tiny" else BATCH_SIZES[family]
