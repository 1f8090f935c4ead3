"""Numbers with units, as people write them: "25 GB/s", "5 Gbps", "10 us", "40 GiB". No JAX.

Bits have a small b, bytes a capital B; k, M, G, T, P are powers of 1000 and Ki, Mi, Gi, Ti powers
of 1024. A plain number is in the base unit: seconds, bytes, bytes per second, FLOP per second.
"""

from __future__ import annotations

import math
import re
from typing import Literal

Dimension = Literal["time", "bytes", "bandwidth", "flops"]

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _units() -> dict[str, dict[str, float]]:
    both = {**_DECIMAL, **_BINARY}
    return {
        # Divisors keep 10 us == 1e-05 exact, where 10 * 1e-6 is not.
        "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
        "bytes": {f"{p}B": scale for p, scale in both.items()},
        "bandwidth": {
            **{f"{p}B/s": scale for p, scale in both.items()},
            **{f"{p}{bit}": s / 8 for p, s in _DECIMAL.items() for bit in ("bps", "bit/s", "b/s")},
        },
        "flops": {
            f"{p}{name}": scale
            for p, scale in _DECIMAL.items()
            for name in ("FLOP/s", "FLOPS", "OP/s")
        },
    }


_UNITS = _units()
_EXAMPLES: dict[str, str] = {
    "time": '"10 us", "0.2 ms" or seconds as a number',
    "bytes": '"40 GiB", "16 GB" or bytes as a number',
    "bandwidth": '"25 GB/s", "5 Gbps" or bytes per second as a number',
    "flops": '"312 TFLOP/s" or FLOP per second as a number',
}
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9]\S*)")


def examples(dimension: Dimension) -> str:
    """How a quantity may be written, for messages."""
    return _EXAMPLES[dimension]


def quantity(text: str, dimension: Dimension) -> float:
    """The value of `text` in the base unit of `dimension`.

    Raises:
      ValueError: the text is not a number with a unit of this dimension; the message says which
        units there are, or which unit differs only in the case of its letters.
    """
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= 100 else None
    if match is None:
        raise ValueError(f"not a number with a unit; write {examples(dimension)}")
    number, unit = match.groups()
    scale = _UNITS[dimension].get(unit)
    if scale is None:
        alike = [u for u in _UNITS[dimension] if u.lower() == unit.lower()]
        hint = f"did you mean {' or '.join(alike)}? " if alike else ""
        raise ValueError(f"the unit {unit!r} is not known; {hint}Write {examples(dimension)}")
    value = float(number)
    value = value / round(1 / scale) if scale < 0.1 else value * scale
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    return value


def counted(number: int, noun: str, plural: str = "") -> str:
    """How many of something, for people: "1 stage", "3 stages".

    Args:
      noun: one of it.
      plural: several of it, where that is not the noun with an "s" ("es" behind "ch", "sh", "x").
    """
    several = plural or f"{noun}{'es' if noun.endswith(('ch', 'sh', 'x')) else 's'}"
    return f"{number} {noun if number == 1 else several}"


def spelled(value: float, dimension: Dimension, digits: int = 3) -> str:
    """A quantity for people: some digits and the unit that suits ("1.25 GB/s", "10 us", "40 GiB").

    Amounts of memory are in powers of 1024 everywhere, as devices are sold.
    """
    if dimension == "time":
        scales = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    else:
        suffix = {"bytes": "B", "bandwidth": "B/s", "flops": "FLOP/s"}[dimension]
        prefixes = {p: s for p, s in _BINARY.items()} if dimension == "bytes" else _DECIMAL
        scales = {f"{p}{suffix}": s for p, s in {"": 1.0, **prefixes}.items()}
    fitting = [unit for unit, scale in scales.items() if abs(value) >= scale * 0.9995]
    unit = max(fitting, key=scales.__getitem__) if fitting else min(scales, key=scales.__getitem__)
    scaled = value / scales[unit]
    whole = abs(scaled) >= 10 ** (digits - 1) - 0.05
    return f"{scaled:.0f} {unit}" if whole else f"{scaled:.{digits}g} {unit}"


def span_text(first: int, last: int) -> str:
    """Numbers from `first` to `last`: "0-4", or "5" for one."""
    return f"{first}" if first == last else f"{first}-{last}"
