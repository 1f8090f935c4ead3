"""Plans by the content that they were made from, as JSON in a folder of the user's own. No JAX.

An entry's name is a hash of everything that decides a plan: the traced program, the cluster, the
options, and the versions of hetpass and JAX. A hit is therefore what planning again would give.
Entries are plain data, read with the limits of any file that a person wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpass.errors import HetpassError
from hetpass.ir.facts import ProgramFacts
from hetpass.ir.plan import Plan

FORMAT = "hetpass-cached-plan/1"


@dataclass(frozen=True)
class Entry:
    """What is kept of a planned step.

    Attributes:
      name: of the step, for people.
      plan, facts: as saved.
      explanation: what `planned.explain()` said.
      versions: of hetpass and JAX.
    """

    name: str
    plan: Plan
    facts: ProgramFacts
    explanation: str
    versions: str


@dataclass(frozen=True)
class PlanCache:
    """Entries in a folder, which is made when the first is written."""

    folder: Path

    def find(self, key: str) -> Entry | None:
        """The entry with this key. One that cannot be read counts as none."""
        try:
            text = self._path(key).read_text(encoding="utf-8")
            data = json.loads(text)
            if data.get("format") != FORMAT:
                return None
            return Entry(
                str(data["name"]),
                Plan.from_json(data["plan"]),
                ProgramFacts.from_json(data["facts"]),
                str(data["explanation"]),
                str(data["versions"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, HetpassError):
            return None

    def keep(self, key: str, entry: Entry) -> None:
        """Writes an entry, whole or not at all. A folder that cannot be written is let be."""
        data = {
            "format": FORMAT,
            "name": entry.name,
            "versions": entry.versions,
            "explanation": entry.explanation,
            "plan": entry.plan.to_json(),
            "facts": entry.facts.to_json(),
        }
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp's files are their owner's alone; a rename replaces in one step.
            handle, partial = tempfile.mkstemp(dir=self.folder, suffix=".partial")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(partial, self._path(key))
        except OSError:
            return

    def entries(self) -> Iterator[tuple[str, Path]]:
        """Keys and files, newest first."""
        files = sorted(self.folder.glob("*.json"), key=lambda f: (-f.stat().st_mtime, f.name))
        return ((file.stem, file) for file in files)

    def remove(self, key: str) -> bool:
        """Removes an entry; whether it was there."""
        path = self._path(key)
        if not path.exists():
            return False
        path.unlink()
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def content_key(parts: Mapping[str, Any]) -> str:
    """A hash of plain data, equal in every process."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
