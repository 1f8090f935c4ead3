"""Plain data as TOML text: what the standard library reads and does not write. No JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(data: Mapping[str, Any]) -> str:
    """A record of records, lists, texts, numbers as TOML; `tomllib.loads` gives it back equal.

    Records at the top become tables, lists of records there arrays of tables; what is deeper is
    written inline. There is no None in TOML: leave such keys out.
    """
    plain, tables = [], []
    for key, value in data.items():
        if isinstance(value, Mapping) and value and all(_is_table(v) for v in value.values()):
            tables += [_table(f"[{_key(key)}.{_key(k)}]", v) for k, v in value.items()]
        elif _is_table(value):
            tables.append(_table(f"[{_key(key)}]", value))
        elif isinstance(value, list) and value and all(_is_table(v) for v in value):
            tables += [_table(f"[[{_key(key)}]]", v) for v in value]
        else:
            plain.append(f"{_key(key)} = {_inline(value)}\n")
    return "\n".join(["".join(plain), *tables] if plain else tables)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _table(head: str, record: Mapping[str, Any]) -> str:
    return head + "\n" + "".join(f"{_key(k)} = {_inline(v)}\n" for k, v in record.items())


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for characters that JSON writes as surrogate pairs and for
    # DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_inline(v) for v in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return repr(value)
