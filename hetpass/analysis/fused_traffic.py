"""Bytes that a piece of program moves to and from memory once a compiler has fused it.

A model of XLA's loop and input fusion. Equations are of two sorts. *Anchors* (products,
convolutions, scatters, sorts, control flow) are kernels of their own: they read operands from
memory and write results there. All others fuse with what they read, up to a reduction: its result
is needed whole before anyone reads it. So every equation has a *generation*, the number of anchors
and reductions on the longest way to it; equations of one generation that read the same value share
one read, and a result that only its own generation reads is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hetpass._jax import DropVar, Jaxpr, JaxprEqn, Var
from hetpass.analysis.flops import (
    APPLIES_A_SCALAR_JAXPR,
    DATA_MOVEMENT,
    ELEMENTWISE,
    REDUCTIONS,
    aval_bytes,
    sub_jaxprs,
)

_FUSES = DATA_MOVEMENT | ELEMENTWISE | REDUCTIONS | {"random_bits", "threefry2x32", "random_gamma"}
_IN_PLACE = frozenset({"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"})
_READS_PART = frozenset({"gather", "dynamic_slice", "slice"})


@dataclass(frozen=True)
class Moved:
    """What a piece of program does to memory.

    Attributes:
      traffic_bytes: read and written.
      peak_bytes: the most that values take which are both made and dropped inside.
    """

    traffic_bytes: float = 0.0
    peak_bytes: float = 0.0


def fused_traffic(
    eqns: Sequence[JaxprEqn],
    outside: Collection[Var],
    uncounted: Collection[Var],
    size: Callable[[Var], float],
    nested: Callable[[JaxprEqn, Collection[int]], Moved] | None = None,
) -> Moved:
    """What the equations move, in the order in which they stand.

    Args:
      outside: results that are read outside.
      uncounted: values whose reads are counted elsewhere (parameters).
      size: bytes of a value.
      nested: what the body of an equation moves, without its operands of the given positions;
        None: as the equation's own shapes say.
    """
    nested = nested or nested_traffic
    readers: dict[Var, list[int]] = {}
    for k, eqn in enumerate(eqns):
        for v in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
            readers.setdefault(v, []).append(k)
    maker = {v: k for k, eqn in enumerate(eqns) for v in eqn.outvars}
    generation = _generations(eqns, maker)
    traffic = 0.0
    for v, places in readers.items():
        if v not in maker and v not in uncounted:
            traffic += _read_bytes(v, places, eqns, generation, size)
    for v, k in maker.items():
        if isinstance(v, DropVar):
            continue
        places = readers.get(v, [])
        fused = not (_breaks(eqns[k]) or _is_nest(eqns[k])) and v not in outside
        if fused and all(generation[r] == generation[k] and _fuses(eqns[r]) for r in places):
            continue
        written = 0.0 if _is_nest(eqns[k]) else size(v)
        traffic += written + _read_bytes(v, places, eqns, generation, size)
    inner = 0.0
    for eqn in eqns:
        if _is_nest(eqn):
            skipped = [i for i, a in enumerate(eqn.invars) if isinstance(a, Var) and a in uncounted]
            moved = nested(eqn, skipped)
            traffic += moved.traffic_bytes
            inner = max(inner, moved.peak_bytes)
    return Moved(traffic, _peak_bytes(eqns, readers, outside, size) + inner)


def _peak_bytes(
    eqns: Sequence[JaxprEqn],
    readers: Mapping[Var, Sequence[int]],
    outside: Collection[Var],
    size: Callable[[Var], float],
) -> float:
    """The most that values take at one time which are made and dropped inside."""
    derived: dict[Var, frozenset[Var]] = {}  # what is made again -> the kept values it takes
    made: dict[Var, int] = {}
    dead: dict[Var, int] = {}  # kept value -> the position from which on its memory is free
    for k, eqn in enumerate(eqns):
        read: set[Var] = set()
        for a in eqn.invars:
            if isinstance(a, Var):
                read |= derived.get(a, {a} if a in made else set())
        keeps = _breaks(eqn) or _is_nest(eqn)
        for v in eqn.outvars:
            places = readers.get(v, ())
            if isinstance(v, DropVar) or not (places or v in outside):
                continue
            if keeps or v in outside or any(not _fuses(eqns[r]) for r in places):
                made[v] = k
                dead.update((r, k + 1) for r in read)
            else:
                derived[v] = frozenset(read)
        if eqn.primitive.name in _IN_PLACE and eqn.invars[0] in read:
            dead[eqn.invars[0]] = k
    changes = [0.0] * (len(eqns) + 1)
    for v, k in made.items():
        if v not in outside and v in dead:
            changes[k] += size(v)
            changes[dead[v]] -= size(v)
    return _most(changes)


def nested_traffic(eqn: JaxprEqn, uncounted: Collection[int] = ()) -> Moved:
    """What the body of a scan, cond, while or call moves: all its trips; the dearest branch.

    Args:
      uncounted: positions of operands whose reads are counted elsewhere.
    """
    name = eqn.primitive.name
    bodies = list(sub_jaxprs(eqn))
    if name == "cond":
        found = [_body(body, [i - 1 for i in uncounted]) for body in bodies]
        return max(found, key=lambda m: m.traffic_bytes)
    if name == "scan":
        body = _body(bodies[0], uncounted)
        return Moved(float(eqn.params["length"]) * body.traffic_bytes, body.peak_bytes)
    if name == "while":
        found = [_body(body, ()) for body in bodies]
        return Moved(sum(m.traffic_bytes for m in found), max(m.peak_bytes for m in found))
    return _body(bodies[0], uncounted)


def _body(body: Jaxpr, uncounted: Collection[int]) -> Moved:
    skipped = {body.invars[i] for i in uncounted if 0 <= i < len(body.invars)}
    outside = {v for v in body.outvars if isinstance(v, Var)}
    return fused_traffic(body.eqns, outside, skipped, lambda v: aval_bytes(v.aval))


def _is_nest(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name not in APPLIES_A_SCALAR_JAXPR and any(True for _ in sub_jaxprs(eqn))


def _fuses(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _FUSES


def _breaks(eqn: JaxprEqn) -> bool:
    """Whether what reads its result belongs to a later generation."""
    return not _fuses(eqn) or eqn.primitive.name in REDUCTIONS


def _generations(eqns: Sequence[JaxprEqn], maker: dict[Var, int]) -> list[int]:
    generation: list[int] = []
    for eqn in eqns:
        before = [maker[a] for a in eqn.invars if isinstance(a, Var) and a in maker]
        generation.append(max((generation[p] + _breaks(eqns[p]) for p in before), default=0))
    return generation


def _read_bytes(
    value: Var,
    places: Sequence[int],
    eqns: Sequence[JaxprEqn],
    generation: Sequence[int],
    size: Callable[[Var], float],
) -> float:
    """One read for every anchor, and for every generation of fused readers."""
    reads: dict[int | tuple[str, int], float] = {}
    for place in places:
        eqn = eqns[place]
        if _is_nest(eqn):
            continue  # its body reads it
        read = size(value)
        if eqn.primitive.name in _READS_PART and eqn.invars[0] is value:
            read = min(read, sum(size(v) for v in eqn.outvars))
        key = generation[place] if _fuses(eqn) else ("anchor", place)
        reads[key] = max(reads.get(key, 0.0), read)
    return sum(reads.values())


def _most(changes: Sequence[float]) -> float:
    total = most = 0.0
    for change in changes:
        total += change
        most = max(most, total)
    return most
