"""Sizes of values, in elements and bytes."""

from __future__ import annotations

import math
from typing import Any

from hetpass.analysis.region_recipes import SMALL_BYTES as SMALL_BYTES


def elements(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def aval_bytes(aval: Any) -> int:
    """Bytes of a value; a key counts as its two words."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 8)
    return elements(aval) * int(itemsize)
