"""Assignments as plain data, for plans. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetpass.errors import PlanError
from hetpass.ir.operation_graph import Assignment, Layout, OperationChoice
from hetpass.ir.records import Reader, at, shown

READER = Reader(PlanError, "HP-PLAN")


def assignment_data(assignment: Assignment) -> dict[str, Any]:
    """What `read_assignment` reads."""
    return {
        "mesh": [list(axis) for axis in assignment.mesh],
        "operations": [
            {
                "factors": [list(axes) for axes in choice.factors],
                "results": [_layout_data(layout) for layout in choice.results],
                **({"partial": sorted(choice.partial)} if choice.partial else {}),
            }
            for choice in assignment.operations
        ],
        "stored": _layouts_data(assignment.stored),
        "at_rest": _layouts_data(assignment.at_rest),
        "accumulators": _layouts_data(assignment.accumulators),
        "gathered_once": sorted(assignment.gathered_once),
        "recompute": assignment.recompute,
        "links": [list(link) for link in assignment.links],
        "reduce_scatter": assignment.reduce_scatter,
    }


def read_assignment(value: Any) -> Assignment:
    """An assignment from plain data.

    Raises:
      PlanError: HP-PLAN-…, with the path of the value that is wrong.
    """
    fields = READER.record(
        value,
        required=("mesh", "operations", "stored", "at_rest", "accumulators"),
        optional=("gathered_once", "recompute", "links", "reduce_scatter"),
    )
    with at("mesh"):
        mesh = READER.items(fields["mesh"], _read_axis)
    names = frozenset(name for name, _ in mesh)
    with at("operations"):
        operations = READER.items(fields["operations"], lambda v: _read_choice(v, names))
    tables = {}
    for name in ("stored", "at_rest", "accumulators"):
        with at(name):
            tables[name] = _read_layouts(fields[name], names)
    with at("gathered_once"):
        gathered = READER.items(fields.get("gathered_once", []), READER.integer)
    with at("links"):
        links = READER.items(fields.get("links", []), _read_link)
        if links and len(links) != len(mesh):
            READER.refuse("VALUE", f"{len(mesh)} axes need as many links, not {len(links)}")
    return Assignment(
        mesh=mesh,
        operations=operations,
        **tables,
        gathered_once=frozenset(gathered),
        recompute=_flag(fields, "recompute", False),
        links=links,
        reduce_scatter=_flag(fields, "reduce_scatter", True),
    )


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        READER.refuse("TYPE", f"true or false is needed, not {shown(value)}", name)
    return bool(value)


def _layout_data(layout: Layout) -> Any:
    dims = [list(axes) for axes in layout.dims]
    return {"dims": dims, "partial": sorted(layout.partial)} if layout.partial else dims


def _layouts_data(layouts: Mapping[int, Layout]) -> dict[str, Any]:
    return {str(number): _layout_data(layout) for number, layout in layouts.items()}


def _read_axis(value: Any) -> tuple[str, int]:
    pair = READER.items(value, lambda item: item)
    if len(pair) != 2:
        READER.refuse("MESH", "an axis is a pair of a name and a size")
    size = READER.integer(pair[1])
    if size < 1:
        READER.refuse("MESH", f"an axis has one device or more, not {size}")
    return READER.text(pair[0]), size


def _read_link(value: Any) -> tuple[float, float]:
    numbers = READER.items(value, READER.number)
    if len(numbers) != 2 or numbers[0] < 0 or numbers[1] <= 0:
        READER.refuse("VALUE", "a link is a latency in seconds and bytes per second")
    return float(numbers[0]), float(numbers[1])


def _read_axes(value: Any, names: frozenset[str]) -> tuple[str, ...]:
    axes = READER.items(value, READER.text)
    for name in axes:
        if name not in names:
            READER.refuse("MESH", f"the mesh has no axis {shown(name)}")
    return axes


def _read_choice(value: Any, names: frozenset[str]) -> OperationChoice:
    fields = READER.record(value, required=("factors", "results"), optional=("partial",))
    with at("factors"):
        factors = READER.items(fields["factors"], lambda v: _read_axes(v, names))
    with at("results"):
        results = READER.items(fields["results"], lambda v: _read_layout(v, names))
    with at("partial"):
        partial = frozenset(_read_axes(fields.get("partial", []), names))
    return OperationChoice(factors, results, partial)


def _read_layout(value: Any, names: frozenset[str]) -> Layout:
    partial: frozenset[str] = frozenset()
    if isinstance(value, Mapping):
        fields = READER.record(value, required=("dims", "partial"))
        partial, value = frozenset(_read_axes(fields["partial"], names)), fields["dims"]
    dims = READER.items(value, lambda axes: _read_axes(axes, names))
    used = [name for axes in dims for name in axes] + list(partial)
    for name in used:
        if used.count(name) > 1:
            READER.refuse("MESH", f"the axis {name!r} cuts a value twice")
    return Layout(dims, partial)


def _read_layouts(value: Any, names: frozenset[str]) -> dict[int, Layout]:
    found = READER.values(value, lambda layout: _read_layout(layout, names))
    for key in found:
        if not key.isdecimal():
            READER.refuse("KEY", f"{shown(key)} is no number of a value")
    return {int(key): layout for key, layout in found.items()}


def assignments_data(assignments: Sequence[Assignment | None]) -> dict[str, Any]:
    """One per layer; equal ones are written once."""
    numbers: dict[Assignment, int] = {}
    of_layer = [
        None if assignment is None else numbers.setdefault(assignment, len(numbers))
        for assignment in assignments
    ]
    return {"choices": [assignment_data(a) for a in numbers], "of_layer": of_layer}


def read_assignments(value: Any) -> tuple[Assignment | None, ...]:
    """What `assignments_data` gave."""
    fields = READER.record(value, required=("choices", "of_layer"))
    with at("choices"):
        choices = READER.items(fields["choices"], read_assignment)

    def one(number: Any) -> Assignment | None:
        if number is None:
            return None
        if not 0 <= READER.integer(number) < len(choices):
            READER.refuse("VALUE", f"there is no choice {number}")
        return choices[number]

    with at("of_layer"):
        return READER.items(fields["of_layer"], one)
