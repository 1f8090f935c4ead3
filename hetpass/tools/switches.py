"""The environment variables that hetpass reads. There are no others.

| variable | meaning |
| --- | --- |
| `HETPASS_CACHE` | the folder of cached plans; default: `hetpass` in the user's cache folder |
| `HETPASS_TRACEBACK` | if set, an error is followed by Python's traceback |
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE, TRACEBACK = "HETPASS_CACHE", "HETPASS_TRACEBACK"


def cache_folder() -> Path:
    """Where plans are cached; it need not exist."""
    chosen = os.environ.get(CACHE)
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hetpass"


def traceback_wanted() -> bool:
    """Whether an error is followed by a traceback."""
    return bool(os.environ.get(TRACEBACK))
