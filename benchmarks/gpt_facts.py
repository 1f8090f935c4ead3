"""Facts of GPT models by closed forms, without tracing.

FLOPs are those that Alpa counts (OSDI 2022): per example and block 24·S·H²·(1 + S/(6H)) forward,
twice that backward, and once more where the block is recomputed; 2·S·H·V forward for the head.
Activations of a block are those of Korthikanti et al. (2022), S·H·(34 + 5·A·S/H) bytes; a block
that is recomputed holds its input alone and needs the rest as workspace. Parameters are float16
with float32 gradients, a float32 copy and the two moments of Adam.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpass.ir.facts import Amount, LayerFacts, ProgramFacts

_HALF, _SINGLE = 2, 4
DTYPE = "float16"


@dataclass(frozen=True)
class GptSize:
    """Sequence S, hidden H, layers, heads A, vocabulary V."""

    hidden: int
    layers: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 51200


SIZES = {
    "760M": GptSize(1536, 24, 16),
    "1.3B": GptSize(2048, 24, 32),
    "2.6B": GptSize(2560, 32, 32),
    "6.7B": GptSize(4096, 32, 32),
    "15B": GptSize(5120, 48, 40),
    "39B": GptSize(8192, 48, 64),
}


def gpt_facts(size: GptSize, batch_size: int = 1024, pieces: int = 2) -> ProgramFacts:
    """An embedding, each block as attention and MLP (2 pieces) or attention, up and down (3), and
    the head; blocks are recomputed in backward."""
    s, h, v = size.sequence, size.hidden, size.vocabulary
    token_bytes = float(_HALF * s * h)
    block_bytes = s * h * (34 + 5 * size.heads * s / h)
    attention = _layer("attention", 8 * s * h * h + 4 * s * s * h, 4 * h * h, size)
    if pieces == 2:
        parts = [attention, _layer("mlp", 16 * s * h * h, 8 * h * h, size)]
        crossing = [token_bytes, token_bytes]
    else:
        parts = [
            attention,
            _layer("mlp up", 8 * s * h * h, 4 * h * h, size, reduced=0.0),
            _layer("mlp down", 8 * s * h * h, 4 * h * h, size),
        ]
        crossing = [token_bytes, 5 * token_bytes, token_bytes]
    block = [
        {
            **part,
            "activation_bytes": token_bytes if i == 0 else 0.0,
            "workspace_bytes": block_bytes,
            "boundary_bytes": crossing[i],
            "gradient_boundary_bytes": crossing[i],
        }
        for i, part in enumerate(parts)
    ]
    embedding = {
        **_layer("embedding", 0.0, (v + s) * h, size, reduced=token_bytes),
        "boundary_bytes": token_bytes,
        "gradient_boundary_bytes": token_bytes,
    }
    head = {
        **_layer("head", 2 * s * h * v, v * h, size, reduced=0.0, recomputed=False),
        "activation_bytes": token_bytes,
        "workspace_bytes": 2.0 * _SINGLE * s * v,
    }
    records: list[dict[str, object] | LayerFacts] = [embedding, *(block * size.layers), head]
    return ProgramFacts.synthetic(records, batch_size)


def _layer(
    kind: str,
    flops: float,
    parameters: float,
    size: GptSize,
    reduced: float | None = None,
    recomputed: bool = True,
) -> dict[str, object]:
    token_bytes = float(_HALF * size.sequence * size.hidden)
    backward = (3 if recomputed else 2) * flops
    return {
        "kind": kind,
        "forward_flops": {DTYPE: Amount(0.0, float(flops))} if flops else {},
        "backward_flops": {DTYPE: Amount(0.0, float(backward))} if flops else {},
        "forward_traffic_bytes": 4 * token_bytes,
        "backward_traffic_bytes": 8 * token_bytes,
        "parameter_bytes": float(_HALF * parameters),
        "state_bytes": float(3 * _SINGLE * parameters),
        "gradient_bytes": float(_SINGLE * parameters),
        "reduced_bytes": token_bytes if reduced is None else reduced,
        "most_tensor_parallel": 8,
    }
