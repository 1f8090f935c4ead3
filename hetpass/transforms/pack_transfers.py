"""Small values that one fragment sends to another stage travel in one array.

Clipping by the global norm sends one number per parameter to every other stage. A transfer costs
about the same for four bytes as for a kilobyte, so the writer joins such numbers and each reader
takes them apart: the same bits, one transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.dtypes import issubdtype, prng_key

from hetpass._jax import Atom, ShapedArray, Var, make_jaxpr_value, make_var
from hetpass.ir.kinds import Whole
from hetpass.ir.program import (
    Feed,
    Fragment,
    FragmentInput,
    FragmentOutput,
    FromSlot,
    Read,
    ReadOffset,
    Slot,
    Staged,
    Transfer,
    Write,
)
from hetpass.ir.quantities import counted
from hetpass.transforms.region import rename_result
from hetpass.transforms.sizes import SMALL_BYTES, aval_bytes, elements
from hetpass.transforms.splice import equations_of


@dataclass(frozen=True)
class _Pack:
    """Values of one dtype that one fragment sends to one stage.

    Attributes:
      writer: the number of the fragment that writes them.
      sources, targets: their slots here and there, in order.
      slot, arrival: the slots of the joined array, here and there.
    """

    writer: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    slot: int
    arrival: int


def pack_transfers(staged: Staged) -> Staged:
    """The same step with small transfers between once-per-step fragments joined."""
    groups = _groups(staged)
    if not groups:
        return staged
    slots = list(staged.slots)
    packs: list[_Pack] = []
    joined: dict[tuple[int, tuple[int, ...]], int] = {}
    for (writer, stage, _), moves in groups.items():
        sources = tuple(t.source for t in moves)
        aval = _joined_aval([slots[s].aval for s in sources])
        fragment = staged.fragments[writer]
        several = counted(len(sources), "value")
        name = f"{several} of {fragment.role} {fragment.phase}, stage {fragment.stage}"
        if (writer, sources) not in joined:
            joined[writer, sources] = _add(slots, staged.fragments[writer].stage, aval, name)
        packs.append(
            _Pack(
                writer,
                sources,
                tuple(t.target for t in moves),
                joined[writer, sources],
                _add(slots, stage, aval, name),
            )
        )
    return _without_unused(_rewritten(staged, slots, packs))


def _add(slots: list[Slot], stage: int, aval: ShapedArray, name: str) -> int:
    index = len(slots)
    slots.append(Slot(index, stage, aval, "step", Whole(), False, name))
    return index


def _joined_aval(avals: Sequence[ShapedArray]) -> ShapedArray:
    return ShapedArray((sum(elements(a) for a in avals),), avals[0].dtype)


def _groups(staged: Staged) -> dict[tuple[int, int, str], list[Transfer]]:
    """The transfers to join, by (writing fragment, stage they go to, dtype): two or more each."""
    written = {
        output.slot: number
        for number, fragment in enumerate(staged.fragments)
        for output in fragment.outputs
        if isinstance(output, Write) and fragment.role in ("prologue", "epilogue")
    }
    fixed = {r.slot for r in staged.results if isinstance(r, FromSlot)}
    fixed.update(t.source for t in staged.transfers if t.source not in written)
    for fragment in staged.fragments:
        if fragment.role not in ("prologue", "epilogue"):
            fixed.update(s.slot for s in fragment.inputs if not isinstance(s, ReadOffset))
    groups: dict[tuple[int, int, str], list[Transfer]] = {}
    for transfer in staged.transfers:
        slot, target = staged.slots[transfer.source], staged.slots[transfer.target]
        small = aval_bytes(slot.aval) <= SMALL_BYTES and not slot.stacked
        if transfer.source not in written or target.index in fixed or not small:
            continue
        if slot.scope == "step" and not issubdtype(slot.aval.dtype, prng_key):
            key = (written[slot.index], target.stage, str(slot.aval.dtype))
            groups.setdefault(key, []).append(transfer)
    return {key: moves for key, moves in groups.items() if len(moves) > 1}


def _rewritten(staged: Staged, slots: list[Slot], packs: Sequence[_Pack]) -> Staged:
    arrivals = {target: pack for pack in packs for target in pack.targets}
    by_writer: dict[int, dict[int, _Pack]] = {}
    for pack in packs:
        by_writer.setdefault(pack.writer, {})[pack.slot] = pack
    fragments = [
        _send(_receive(fragment, arrivals, slots), by_writer.get(number, {}), slots)
        for number, fragment in enumerate(staged.fragments)
    ]
    fragments = _freed_last(fragments, {pack.arrival for pack in packs})
    kept = [t for t in staged.transfers if t.target not in arrivals]
    added = [Transfer(pack.slot, pack.arrival) for pack in packs]
    return replace(
        staged, slots=tuple(slots), fragments=tuple(fragments), transfers=(*kept, *added)
    )


def _freed_last(fragments: Sequence[Fragment], arrivals: set[int]) -> list[Fragment]:
    """Of the fragments, in order of time, that read a part of a joined array, the last frees it."""
    found: list[Fragment] = []
    freed: set[int] = set()
    for fragment in reversed(fragments):
        frees = tuple(slot for slot in fragment.frees if slot not in freed)
        freed.update(arrivals.intersection(frees))
        found.append(replace(fragment, frees=frees))
    return found[::-1]


def _receive(fragment: Fragment, arrivals: Mapping[int, _Pack], slots: Sequence[Slot]) -> Fragment:
    """Reads joined arrays instead of their parts, and takes them apart first."""
    inputs: dict[Var, FragmentInput] = {}
    wanted: dict[int, dict[int, Var]] = {}
    packs: dict[int, _Pack] = {}
    for var, source in zip(fragment.jaxpr.invars, fragment.inputs, strict=True):
        pack = arrivals.get(source.slot) if isinstance(source, Read) else None
        if pack is None or not isinstance(source, Read):
            inputs[var] = source
        else:
            packs[pack.arrival] = pack
            wanted.setdefault(pack.arrival, {})[source.slot] = var
    if not wanted:
        return fragment
    head: list[Any] = []
    for arrival, parts in wanted.items():
        whole = make_var(slots[arrival].aval)
        inputs[whole] = Read(arrival)
        start = len(head)
        bounds = _bounds([slots[s].aval for s in packs[arrival].sources])
        ranges = [bounds[packs[arrival].targets.index(slot)] for slot in parts]
        shapes = [v.aval.shape for v in parts.values()]
        spliced = equations_of(lambda x, r=ranges, s=shapes: _take_apart(x, r, s), whole)
        head.extend(spliced.eqns)
        for made, var in zip(spliced.outs, parts.values(), strict=True):
            rename_result(head, start, made, var)
    frees = list(dict.fromkeys(arrivals[s].arrival if s in arrivals else s for s in fragment.frees))
    jaxpr = make_jaxpr_value(list(inputs), fragment.jaxpr.outvars, [*head, *fragment.jaxpr.eqns])
    return replace(fragment, jaxpr=jaxpr, inputs=tuple(inputs.values()), frees=tuple(frees))


def _send(fragment: Fragment, packs: Mapping[int, _Pack], slots: Sequence[Slot]) -> Fragment:
    """Writes joined arrays too."""
    if not packs:
        return fragment
    values: dict[int, Atom] = {
        output.slot: atom
        for output, atom in zip(fragment.outputs, fragment.jaxpr.outvars, strict=True)
        if isinstance(output, Write)
    }
    tail: list[Any] = []
    outvars: list[Atom] = list(fragment.jaxpr.outvars)
    outputs: list[FragmentOutput] = list(fragment.outputs)
    for slot, pack in packs.items():
        spliced = equations_of(_join, *(values[s] for s in pack.sources))
        tail.extend(spliced.eqns)
        outvars += spliced.outs
        outputs.append(Write(slot))
    jaxpr = make_jaxpr_value(fragment.jaxpr.invars, outvars, [*fragment.jaxpr.eqns, *tail])
    return replace(fragment, jaxpr=jaxpr, outputs=tuple(outputs))


def _bounds(avals: Sequence[ShapedArray]) -> list[tuple[int, int]]:
    edges = [0]
    for aval in avals:
        edges.append(edges[-1] + elements(aval))
    return list(zip(edges, edges[1:], strict=False))


def _join(*values: Any) -> Any:
    return lax.concatenate([jnp.ravel(v) for v in values], 0)


def _take_apart(
    whole: Any, ranges: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    return [
        lax.slice_in_dim(whole, lo, hi).reshape(shape)
        for (lo, hi), shape in zip(ranges, shapes, strict=True)
    ]


def _without_unused(staged: Staged) -> Staged:
    """Without the slots that nothing reads or sends any more, renumbered."""
    used = {f.slot for f in staged.feeds} | {
        r.slot for r in staged.results if isinstance(r, FromSlot)
    }
    used.update(slot for t in staged.transfers for slot in (t.source, t.target))
    for fragment in staged.fragments:
        used.update(s.slot for s in fragment.inputs if not isinstance(s, ReadOffset))
        used.update(o.slot for o in fragment.outputs if not isinstance(o, Write))
    new = {old: k for k, old in enumerate(sorted(used))}
    return replace(
        staged,
        slots=tuple(replace(staged.slots[old], index=k) for old, k in new.items()),
        fragments=tuple(_renumbered(fragment, new) for fragment in staged.fragments),
        transfers=tuple(Transfer(new[t.source], new[t.target]) for t in staged.transfers),
        feeds=tuple(Feed(f.input, new[f.slot]) for f in staged.feeds),
        results=tuple(
            FromSlot(new[r.slot]) if isinstance(r, FromSlot) else r for r in staged.results
        ),
    )


def _renumbered(fragment: Fragment, new: Mapping[int, int]) -> Fragment:
    outs = [
        (atom, replace(output, slot=new[output.slot]))
        for atom, output in zip(fragment.jaxpr.outvars, fragment.outputs, strict=True)
        if output.slot in new
    ]
    inputs = tuple(
        s if isinstance(s, ReadOffset) else replace(s, slot=new[s.slot]) for s in fragment.inputs
    )
    jaxpr = make_jaxpr_value(fragment.jaxpr.invars, [atom for atom, _ in outs], fragment.jaxpr.eqns)
    return replace(
        fragment,
        jaxpr=jaxpr,
        inputs=inputs,
        outputs=tuple(output for _, output in outs),
        frees=tuple(new[s] for s in fragment.frees if s in new),
    )
