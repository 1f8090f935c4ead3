"""What a GPU does for the layers of the measured transformers: products, passes, sums. No JAX.

The programs that were measured are PyTorch, unfused, in float32: attention multiplies queries and
keys into a whole matrix of scores, masks it, and takes its softmax, each a pass over that matrix;
normalizations, dropouts, activations and residuals are passes over activations. Tensor parallelism
is Megatron-LM's: two sums of activations in forward, two in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetpass.cost.operations import Operation, Work

WORD = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Transformer:
    """Sizes of a model, and whether its last layer multiplies with the vocabulary."""

    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    has_head: bool


MODELS: Mapping[str, Transformer] = MappingProxyType(
    {
        "OPT-350": Transformer(1024, 16, 2048, 50272, True),
        "OPT-30": Transformer(7168, 56, 2048, 50272, True),
        "GPT-Neo-2.7": Transformer(2560, 32, 2048, 50257, False),
    }
)


def embedding(model: Transformer, examples: int) -> tuple[tuple[Operation, ...], float]:
    """Lookup, position, their sum; and the bytes that the row sums."""
    size = examples * model.sequence * model.hidden * WORD
    return (Operation("memory", 0.0, 2.0 * size, 3),), size


def block(
    model: Transformer, examples: int, ways: int, backward: bool
) -> tuple[tuple[Operation, ...], float]:
    """Attention and two products around an activation; and the bytes of each of two sums."""
    tokens, hidden = examples * model.sequence, model.hidden
    share = hidden / ways
    size = tokens * hidden * WORD
    scores = examples * model.heads / ways * model.sequence**2 * WORD
    passes = 3 if backward else 2  # read, write; backward reads a second operand
    products = [
        _product(tokens, 3 * share, hidden, 2 if backward else 1),
        _product(tokens, hidden, share, 2 if backward else 1),
        _product(tokens, 4 * share, hidden, 2 if backward else 1),
        _product(tokens, hidden, 4 * share, 2 if backward else 1),
    ]
    inner = 2.0 * examples * model.heads / ways * model.sequence**2 * hidden / model.heads
    sort = "batched product, backward" if backward else "batched product"
    attention = [
        Operation(sort, inner, scores + 2 * size / ways, 4 if backward else 2),
        Operation("memory", 0.0, 2.0 * scores),  # the mask
        Operation("memory", 0.0, float(passes * scores)),  # softmax
    ]
    others = [
        Operation("memory", 0.0, float(passes * size), 6),
        Operation("memory", 0.0, float(passes * 4 * size / ways), 2),
        Operation("memory", 0.0, 2.0 * 3 * size / ways),
    ]
    if backward:  # gradients are added to what is there
        others.append(Operation("memory", 0.0, 3.0 * 3 * hidden * share * WORD, 4))
    return (*products, *attention, *others), size


def head(
    model: Transformer, examples: int, ways: int, backward: bool
) -> tuple[tuple[Operation, ...], float]:
    """The last normalization, and, where the model has it, the product with the vocabulary and the
    loss; and the bytes that the row sums."""
    tokens = examples * model.sequence
    size = tokens * model.hidden * WORD
    if not model.has_head:
        return (Operation("memory", 0.0, 2.0 * size, 4),), 0.0
    words = model.vocabulary / ways
    parts = (
        _product(tokens, words, model.hidden, 2 if backward else 1),
        Operation("memory", 0.0, 2.0 * tokens * words * WORD, 2 if backward else 3),
        Operation("memory", 0.0, 2.0 * size, 2),
    )
    return parts, float(size) if backward else 0.0


def _product(rows: float, columns: float, inner: float, count: int) -> Operation:
    moved = WORD * (rows * inner + inner * columns + rows * columns)
    return Operation("product", 2.0 * rows * columns * inner, moved, count)


def layer_work(
    model: Transformer,
    layer: str,
    setting: tuple[int, int, bool],
    sum_s: Callable[[float], float],
) -> Work:
    """One layer in one direction.

    Args:
      layer: "embedding", "block" or "head".
      setting: examples, ways, backward.
      sum_s: seconds that the row's link takes for a sum of so many bytes.
    """
    examples, ways, backward = setting
    sums = 1
    if layer == "embedding":
        parts, size = embedding(model, examples)
    elif layer == "block":
        parts, size = block(model, examples, ways, backward)
        sums = 2
    else:
        parts, size = head(model, examples, ways, backward)
    if ways == 1 or not size:
        return Work(parts)
    return Work(parts, sums * sum_s(size), sums * (ways - 1))
