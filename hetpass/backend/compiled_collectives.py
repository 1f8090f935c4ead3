"""The collectives of a compiled program, by the mesh axes along which devices talk.

Read from the text of the optimized HLO module. Instructions inside a loop count once per iteration,
where the compiler knows how many there are.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
    "ragged-all-to-all": "all_to_all",
}

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?([\w.-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.-]+\s*=\s*(?P<result>.*?)\s"
    rf"(?P<kind>{'|'.join(sorted(map(re.escape, KINDS), key=len, reverse=True))})"
    r"(?P<start>-start)?\("
)
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NAME = re.compile(r'op_name="([^"]*)"')
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:,\s*device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]*))\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")

Groups = frozenset[frozenset[int]]


@dataclass(frozen=True)
class CompiledCollective:
    """One instruction.

    Attributes:
      kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast".
      axes: mesh axes along which devices talk; ("?",) for groups that are no axes of the mesh.
      result_bytes: of its results on one device; a combined one has several.
      count: how often it runs in one run of the program.
      operation: what it was made for, by the names of the program.
    """

    kind: str
    axes: tuple[str, ...]
    result_bytes: int
    count: int
    operation: str


def compiled_collectives(
    text: str, mesh: Sequence[tuple[str, int]]
) -> tuple[CompiledCollective, ...]:
    """In the order of the text.

    Args:
      text: of the module, as `Compiled.as_text()` gives it.
      mesh: (axis, size) pairs; devices are numbered row by row.
    """
    computations, entry = _computations(text)
    times = _times(computations, entry)
    known = _axis_groups(mesh)
    found = []
    for name, lines in computations.items():
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match and times.get(name, 0):
                found.append(_collective(match, line, times[name], known, mesh))
    return tuple(found)


def _collective(
    match: re.Match[str],
    line: str,
    count: int,
    known: Mapping[Groups, tuple[str, ...]],
    mesh: Sequence[tuple[str, int]],
) -> CompiledCollective:
    shapes = [_shape_bytes(*shape) for shape in _SHAPE.findall(match["result"])]
    if match["start"] and match["kind"] in ("all-gather", "collective-permute"):
        # The start of these yields (operands, results, context).
        shapes = shapes[len(shapes) // 2 :] if len(shapes) == 2 else shapes[1:2]
    name = _NAME.search(line)
    if match["kind"] == "collective-permute":
        axes = _permuted_axes(line, mesh)
    else:
        groups = replica_groups(line, math.prod(size for _, size in mesh))
        axes = known.get(groups, ("?",))
    return CompiledCollective(
        KINDS[match["kind"]], axes, sum(shapes), count, name[1] if name else ""
    )


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(name -> lines, the name of the entry computation)."""
    found: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if not line.startswith((" ", "\t", "}")):
            match = _COMPUTATION.match(line)
            if match:
                current = match[1]
                found[current] = []
                if line.startswith("ENTRY"):
                    entry = current
        elif current:
            found[current].append(line)
    return found, entry


def _times(computations: Mapping[str, Sequence[str]], entry: str) -> dict[str, int]:
    """How often each computation runs in one run of the entry."""
    times = dict.fromkeys(computations, 0)

    def run(name: str, count: int) -> None:
        if name not in computations:
            return
        times[name] += count
        for line in computations[name]:
            called = _CALLED.findall(line)
            for group in _BRANCHES.findall(line):
                called += [c.strip().lstrip("%") for c in group.split(",")]
            trips = _TRIPS.search(line)
            for inner in called:
                run(inner, count * (int(trips[1]) if trips and " while(" in line else 1))

    run(entry, 1)
    return times


def replica_groups(line: str, devices: int) -> Groups:
    """The groups of an instruction, in whichever form they are printed."""
    iota, mesh, lists = _IOTA.search(line), _MESH.search(line), _LISTS.search(line)
    if iota:
        order = _iota(iota[2], iota[3])
        sizes = _numbers(iota[1])
        return _chunks(order, sizes[-1])
    if mesh:
        return _mesh_groups(mesh)
    if lists and lists[1]:
        return frozenset(
            frozenset(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", lists[1])
        )
    return frozenset({frozenset(range(devices))})


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


def _iota(shape: str, transposed: str | None) -> list[int]:
    """0, 1, … in an array of the shape, read in the transposed order."""
    sizes = _numbers(shape)
    order = _numbers(transposed) or list(range(len(sizes)))
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    places = itertools.product(*(range(sizes[k]) for k in order))
    return [sum(p * strides[k] for p, k in zip(place, order, strict=True)) for place in places]


def _chunks(order: Sequence[int], size: int) -> Groups:
    return frozenset(frozenset(order[k : k + size]) for k in range(0, len(order), size))


def _mesh_groups(match: re.Match[str]) -> Groups:
    """Groups along some axes of a mesh of its own, or parts of axes: `'axis_1':(2)2` is the part
    of size 2 with 2 more major to it."""
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])]
    total = math.prod(size for _, size in axes)
    order = _iota(match[2], match[3]) if match[2] else _numbers(match[4]) or list(range(total))
    sizes: list[int] = []
    chosen: list[int] = []
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, major, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[5]):
        full = dict(axes)[name]
        parts.setdefault(name, []).append((int(major or 1), int(size or full)))
    for name, size in axes:
        left, major = size, 1
        for before, part in sorted(parts.get(name, ())):
            sizes.append(before // major)
            chosen.append(len(sizes))
            sizes.append(part)
            left //= (before // major) * part
            major = before * part
        sizes.append(left)
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    rest = [k for k in range(len(sizes)) if k not in chosen]
    groups = set()
    for fixed in itertools.product(*(range(sizes[k]) for k in rest)):
        base = sum(p * strides[k] for p, k in zip(fixed, rest, strict=True))
        members = itertools.product(*(range(sizes[k]) for k in chosen))
        groups.add(
            frozenset(
                order[base + sum(p * strides[k] for p, k in zip(member, chosen, strict=True))]
                for member in members
            )
        )
    return frozenset(groups)


def _axis_groups(mesh: Sequence[tuple[str, int]]) -> dict[Groups, tuple[str, ...]]:
    """The groups of devices along every set of axes; axes of size 1 count for nothing."""
    sizes = [size for _, size in mesh]
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    found: dict[Groups, tuple[str, ...]] = {}
    axes = [k for k, size in enumerate(sizes) if size > 1]
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            groups: dict[tuple[int, ...], set[int]] = {}
            for place in itertools.product(*(range(size) for size in sizes)):
                key = tuple(p for k, p in enumerate(place) if k not in chosen)
                device = sum(p * s for p, s in zip(place, strides, strict=True))
                groups.setdefault(key, set()).add(device)
            names = tuple(mesh[k][0] for k in chosen)
            found.setdefault(frozenset(map(frozenset, groups.values())), names)
    return found


def _permuted_axes(line: str, mesh: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The axes along which a permutation's sources and targets differ."""
    pairs = _PAIRS.search(line)
    moved: set[str] = set()
    for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else ():
        ends = [dict(_place(int(end), mesh)) for end in pair]
        moved.update(name for name, _ in mesh if ends[0][name] != ends[1][name])
    return tuple(name for name, _ in mesh if name in moved)


def _place(device: int, mesh: Sequence[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    for name, size in reversed(mesh):
        yield name, device % size
        device //= size


def _shape_bytes(dtype: str, dims: str) -> int:
    count = math.prod(int(d) for d in dims.split(",") if d)
    digits = re.search(r"\d+", dtype)
    bits = _ITEM_BITS.get(dtype, int(digits.group()) if digits else 8)
    return (count * bits + 7) // 8
