"""Reading plain data that a person wrote: files of clusters and plans. No JAX.

A file is refused by name, never half read: unknown keys, wrong types, duplicate keys, files that
are too large or too deep. Readers raise with the path *below* the value they were given, and
`at(prefix)` puts what is above in front, so that the same check names `groups[1].hosts` in a
file and `hosts` when a record is made by hand.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hetpass.errors import HetpassError

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 16
MAX_SHOWN = 60

# For refusals that know of nothing better, by the last word of their code.
_WAYS_OUT = {
    "TYPE": ("write a value of the kind that is needed at this place",),
    "VALUE": ("write a value within the bounds that are named",),
    "SYNTAX": ("correct the text at the position that is named",),
    "DEPTH": ("write the records flat, as in the examples of the documentation",),
    "FILE": ("give the path of a small file of UTF-8 text",),
    "DUPLICATE": ("keep one of the two",),
    "TEXT": ("write one line such as 'fast[4](data=2,model=2): 0-13 | slow: 14-24'",),
    "MESH": ("give axes whose sizes multiply to the devices: 'fast[4](data=2,model=2)'",),
    "DEVICES": ("give free devices, by count or by number: 'fast[2]', 'fast[0-1,3]'",),
}

T = TypeVar("T")
_BARE = re.compile(r"[A-Za-z0-9_.-]{1,60}")


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, cut to a bearable length."""
    # Containers are cut before they are printed: a repr of deep data can exhaust the stack.
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def place(key: str) -> str:
    """A key as it stands in a path: bare, or quoted where it could be misread."""
    return key if _BARE.fullmatch(key) else shown(key)


def nearest(name: object, known: Iterable[str]) -> tuple[str, ...]:
    """Ways out for a name that is not known: what it may have meant, and what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name)[:200], names, n=3, cutoff=0.5)
    ways = [f"did you mean {' or '.join(repr(n) for n in close)}?"] if close else []
    if names:
        listed = ", ".join(names[:30]) + (", …" if len(names) > 30 else "")
        ways.append(f"known: {listed}")
    return tuple(ways)


@contextmanager
def at(prefix: str) -> Iterator[None]:
    """Puts `prefix` in front of the place of every HetpassError that leaves the block.

    A prefix that ends in a colon names a file; others are steps of a path.
    """
    try:
        yield
    except HetpassError as error:
        if prefix.endswith(":"):
            joint = " " if error.where else ""
        else:
            joint = "" if not error.where or error.where.startswith("[") else "."
        raise type(error)(
            error.code,
            error.what,
            where=f"{prefix}{joint}{error.where}",
            details=error.details,
            ways_out=error.ways_out,
        ) from error.__cause__


class Reader:
    """Reads records of one kind of file; every refusal is an `error` with code `area`-….

    Args:
      error: the class to raise.
      area: the first part of the codes, "HP-CLUSTER".
    """

    def __init__(self, error: type[HetpassError], area: str) -> None:
        self.error = error
        self.area = area

    def refuse(
        self,
        word: str,
        what: str,
        where: str = "",
        *,
        details: Sequence[str] = (),
        ways_out: Sequence[str] = (),
    ) -> NoReturn:
        raise self.error(
            f"{self.area}-{word}",
            what,
            where=where,
            details=details,
            ways_out=ways_out or _WAYS_OUT.get(word, ()),
        )

    # -- whole files --------------------------------------------------------------------------

    def path(self, value: Any) -> Path:
        """The path of a file."""
        if not isinstance(value, (str, Path)):
            self.refuse("TYPE", f"the path of a file is needed, not {shown(value)}", "path",
                        ways_out=('"cluster.toml", or a pathlib.Path',))  # fmt: skip
        return Path(value)

    def write(self, path: Any, text: str) -> None:
        """A file of UTF-8 text."""
        file = self.path(path)
        try:
            file.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            self.refuse("FILE", f"the file cannot be written: {reason}", shown(str(file))[1:-1],
                        ways_out=("name a file in a folder that exists",))  # fmt: skip

    def load(self, path: str | Path, suffixes: Sequence[str] = (".toml", ".json")) -> Any:
        """The data in a file, told apart by its suffix."""
        file = self.path(path)
        suffix = file.suffix.lower()
        if suffix not in suffixes:
            self.refuse(
                "FILE",
                f"the suffix {suffix!r} says no format that is read here",
                str(file),
                ways_out=[f"write the file as {' or '.join(suffixes)}"],
            )
        try:
            # Read one byte more than is allowed, so that a huge file is never held.
            with file.open("rb") as handle:
                raw = handle.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:  # a path may hold what no file can be called
            reason = getattr(error, "strerror", None) or error
            self.refuse("FILE", f"the file cannot be read: {reason}", shown(str(file))[1:-1])
        with at(f"{file}:"):
            if len(raw) > MAX_FILE_BYTES:
                self.refuse("FILE", f"the file is larger than {MAX_FILE_BYTES} bytes")
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                self.refuse("FILE", f"the file is not UTF-8 text: {error.reason}")
            return self.parse(text, suffix)

    def parse(self, text: str, suffix: str) -> Any:
        """The data in a text of TOML or JSON, with its depth and numbers checked."""
        if len(text) > MAX_FILE_BYTES:
            self.refuse("FILE", f"the text is longer than {MAX_FILE_BYTES} characters")
        try:
            if suffix == ".toml":
                data: Any = tomllib.loads(text)
            else:
                data = json.loads(
                    text,
                    object_pairs_hook=self._without_duplicates,
                    parse_constant=self._no_constant,
                )
        except RecursionError:
            self.refuse("DEPTH", f"the data is nested more than {MAX_DEPTH} deep")
        except ValueError as error:  # both decoders' errors, and integers beyond any use
            self.refuse("SYNTAX", f"the text is not {suffix[1:].upper()}: {error}")
        self._check_depth(data)
        return data

    def _without_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            self.refuse("DUPLICATE", f"the key {shown(twice)} stands twice in one record")
        return record

    def _no_constant(self, name: str) -> NoReturn:
        self.refuse("VALUE", f"{name} is no number that a file may hold")

    def _check_depth(self, data: Any) -> None:
        level = [data]
        for _ in range(MAX_DEPTH):
            level = [
                child
                for value in level
                if isinstance(value, (dict, list))
                for child in (value.values() if isinstance(value, dict) else value)
            ]
            if not level:
                return
        self.refuse("DEPTH", f"the data is nested more than {MAX_DEPTH} deep")

    # -- records ------------------------------------------------------------------------------

    def record(
        self, value: Any, *, required: Sequence[str], optional: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """`value`, if it is a record that holds every required and no unknown key."""
        fields = self.mapping(value)
        known = [*required, *optional]
        for key in fields:
            if key not in known:
                self.refuse(
                    "KEY",
                    f"the key {shown(key)} is not known here",
                    place(key),
                    ways_out=nearest(key, known),
                )
        for key in required:
            if key not in fields:
                self.refuse(
                    "MISSING",
                    f"the key {key!r} is missing",
                    key,
                    ways_out=[f"add {key!r}; the record has {', '.join(fields) or 'no key'}"],
                )
        return fields

    def mapping(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            self.refuse("TYPE", f"a record is needed, not {shown(value)}")
        return value

    def pairs(self, value: Any) -> Mapping[Any, Any]:
        """A mapping, whatever its keys are."""
        if not isinstance(value, Mapping):
            self.refuse("TYPE", f"a mapping is needed, not {shown(value)}")
        return value

    def items(self, value: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
        """A list, each item read by `read`."""
        if not isinstance(value, (list, tuple)):
            self.refuse("TYPE", f"a list is needed, not {shown(value)}")
        results = []
        for index, item in enumerate(value):
            with at(f"[{index}]"):
                results.append(read(item))
        return tuple(results)

    def values(self, value: Any, read: Callable[[Any], T]) -> dict[str, T]:
        """A record with free keys, each value read by `read`."""
        results = {}
        for key, item in self.mapping(value).items():
            with at(place(key)):
                results[key] = read(item)
        return results

    def text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.refuse("TYPE", f"a text is needed, not {shown(value)}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            self.refuse("TYPE", f"{shown(value)} is no Unicode text")
        return value

    def integer(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            self.refuse("TYPE", f"a whole number is needed, not {shown(value)}")
        return operator.index(value)

    def number(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            self.refuse("TYPE", f"a number is needed, not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.refuse("VALUE", f"a finite number is needed, not {shown(value)}")
        return number
