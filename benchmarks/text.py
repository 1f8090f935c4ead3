"""Text to train on that every Python has: the sources of its own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB = 256  # a token is a byte


def standard_library_bytes(limit_bytes: int = 2_000_000) -> bytes:
    """Sources of the running interpreter's standard library, in order of path, cut at a size."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if size >= limit_bytes:
            break
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        piece = path.read_bytes()[: limit_bytes - size]
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class TextBatches:
    """Random crops of a text, the same for the same seed.

    Iterating yields {"tokens", "labels"}: (batch, seq) int32 each, labels one byte ahead.
    """

    text: bytes
    batch: int
    seq: int
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.text) <= self.seq:
            raise ValueError(f"a text of {len(self.text)} bytes has no crop of {self.seq + 1}")

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        tokens = np.frombuffer(self.text, np.uint8)
        draw = np.random.default_rng(self.seed)
        while True:
            starts = draw.integers(0, len(tokens) - self.seq, size=self.batch)
            crops = np.stack([tokens[s : s + self.seq + 1] for s in starts]).astype(np.int32)
            yield {"tokens": crops[:, :-1], "labels": crops[:, 1:]}
