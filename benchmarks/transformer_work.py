"""What a GPU does for the layers of the measured transformers: products, passes, sums. No JAX.

The programs that were measured are PyTorch, unfused, in float32: attention multiplies queries and
keys into a whole matrix of scores, masks it, and takes its softmax, each a pass over that matrix;
normalizations, biases, dropouts, activations and residuals are passes over activations; the loss
is five over what it is taken of. Tensor parallelism is Megatron-LM's: two sums of activations in
forward, two in backward.

Sizes are what `layer_bytes.json` says. Of a block's bytes those that grow with the square of the
sequence are one matrix of scores: 16 heads in OPT-350 (268 MB of 361 MB), 56 in OPT-30, and 20 in
GPT-Neo (336 MB of 682 MB; 32 heads, as its table of sizes has it, would leave less than its linear
layers alone keep). Embedding and residuals of GPT-Neo keep a byte a number more: dropout's mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetpass.cost.operations import Operation, Sums, Work

WORD = 4
"""Bytes of a number."""

CALLS: Mapping[str, int] = MappingProxyType({"embedding": 3, "block": 12, "head": 2})
"""Modules of a layer: what the host hands out one by one. A product with the vocabulary is one more
in the head; starting a backward pass is two."""


@dataclass(frozen=True)
class Transformer:
    """Sizes of a model.

    Attributes:
      hidden, heads, sequence, vocabulary: as usual.
      has_head: whether its last layer multiplies with the vocabulary.
      drops: whether it drops out.
      adds_bias: whether the product before the activation has a bias, a pass of its own.
    """

    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    has_head: bool = True
    drops: bool = False
    adds_bias: bool = True


MODELS: Mapping[str, Transformer] = MappingProxyType(
    {
        "OPT-350": Transformer(1024, 16, 2048, 50272),
        "OPT-30": Transformer(7168, 56, 2048, 50272),
        "GPT-Neo-2.7": Transformer(2560, 20, 2048, 50257, False, True, False),
    }
)


@dataclass(frozen=True)
class Setting:
    """How a layer was measured.

    Attributes:
      examples: of a microbatch.
      ways: devices that share a matrix.
      backward: the direction.
      across: FLOPs that products of gradients count for each of theirs: more where the device reads
        operands across more slowly.
    """

    examples: int
    ways: int
    backward: bool
    across: float = 1.0


Parts = tuple[list[Operation], list[float]]
"""Operations, and the bytes that the row sums, once each."""


def embedding(model: Transformer, setting: Setting) -> Parts:
    """Lookups of words and places, their sum, and sequence first."""
    size = setting.examples * model.sequence * model.hidden * WORD
    parts = [_passes(2.0 * size, 3), _passes(3.0 * size)]
    if model.drops:
        parts.append(_passes(2.25 * size))
    if setting.ways > 1:  # other devices' words are blanked
        parts.append(_passes(1.0 * size))
    return parts, [size]


def block(model: Transformer, setting: Setting) -> Parts:
    """Attention and two products around an activation."""
    tokens, hidden = setting.examples * model.sequence, model.hidden
    share, size = hidden / setting.ways, float(tokens * hidden * WORD)
    parts = [
        _product(setting, tokens, 3 * share, hidden),
        _product(setting, tokens, hidden, share),
        _product(setting, tokens, 4 * share, hidden),
        _product(setting, tokens, hidden, 4 * share),
        *_attention(model, setting),
        _passes(3 * size, 2),  # residuals
        _passes(2 * size / setting.ways),  # heads side by side
    ]
    if model.drops:
        parts.append(_passes(2.25 * size, 2))
    cut = size / setting.ways
    if not setting.backward:  # normalizations, biases, activation
        parts += [_passes(2 * size, 2), _passes(6 * cut), _passes(8 * cut, 1 + model.adds_bias)]
    else:
        parts += [
            _passes(7 * size, 2),  # normalizations: of their input, then of their parameters
            _passes(3 * cut, 2),
            _passes(12 * cut),
            *(_passes(3 * n * hidden * share * WORD) for n in (3, 1, 4, 4)),  # added to gradients
        ]
    return parts, [size, size]


def _attention(model: Transformer, setting: Setting) -> list[Operation]:
    examples, share = setting.examples, model.heads / setting.ways
    scores = examples * share * model.sequence**2 * WORD
    size = examples * model.sequence * model.hidden * WORD / setting.ways
    flops = 2.0 * examples * share * model.sequence**2 * model.hidden / model.heads
    if not setting.backward:
        products = Operation("batched product", flops, scores + 2 * size, 2)
        return [products, _passes(2 * scores, 2)]  # mask, softmax
    flops *= setting.across
    products = Operation("batched product, backward", flops, scores + 2 * size, 4)
    return [products, _passes(3 * scores), _passes(4 * scores)]


def head(model: Transformer, setting: Setting) -> Parts:
    """The last normalization, the product with the vocabulary where the model has it, and the loss:
    largest, difference, exponents, their sum, shares."""
    tokens = setting.examples * model.sequence
    size = float(tokens * model.hidden * WORD)
    width = model.vocabulary / setting.ways if model.has_head else model.hidden
    of = tokens * width * WORD
    if setting.backward:
        parts = [_passes(2 * of), _passes(7 * size)]
    else:
        parts = [_passes(of, 2), _passes(2 * of, 3), _passes(2 * size)]
    if not model.has_head:
        return parts, []
    parts.append(_product(setting, tokens, width, model.hidden))
    if setting.backward:
        parts.append(_passes(3 * model.hidden * width * WORD))
    return parts, [size] if setting.backward else 3 * [float(tokens * WORD)]


def _passes(size_bytes: float, count: float = 1) -> Operation:
    return Operation("memory", 0.0, float(size_bytes), count)


def _product(setting: Setting, rows: float, columns: float, inner: float) -> Operation:
    """With its gradients: two products."""
    moved = WORD * (rows * inner + inner * columns + rows * columns)
    flops = 2.0 * rows * columns * inner
    if setting.backward:
        return Operation("product, backward", flops * setting.across, moved, 2)
    return Operation("product", flops, moved)


def layer_work(
    model: Transformer, layer: str, setting: Setting, sum_s: Callable[[float], float], bus: bool
) -> Work:
    """One layer in one direction.

    Args:
      layer: "embedding", "block" or "head".
      sum_s: seconds that the row's link takes for a sum of so many bytes.
      bus: whether that link is a bus.
    """
    make = {"embedding": embedding, "block": block, "head": head}[layer]
    parts, summed = make(model, setting)
    calls = CALLS[layer] + (layer == "head" and model.has_head) + 2 * setting.backward
    if setting.ways == 1:
        summed = []
    seconds = sum(sum_s(size) for size in summed)
    sums = Sums(len(summed), seconds, len(summed) * (setting.ways - 1), bus)
    return Work(tuple(parts), sums, calls, setting.backward)
