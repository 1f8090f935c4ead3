"""Device kinds and links as the plain data of a file. No JAX.

A kind in a file:

    peak_flops = { float32 = "15.7 TFLOP/s", float16 = "125 TFLOP/s" }
    memory = "16 GiB"
    memory_bandwidth = "900 GB/s"
    capabilities = ["reduce_scatter"]                        # optional
    link = { latency = "5 us", bandwidth = "150 GB/s" }      # optional
    source = "where the numbers are from"                    # optional
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetpass.ir.devices import READER, DeviceKind, Link
from hetpass.ir.quantities import Dimension, examples, quantity
from hetpass.ir.records import at, shown


def read_quantity(value: Any, dimension: Dimension) -> float:
    """A plain number in the base unit, or a text with a unit."""
    if not isinstance(value, str):
        try:
            return READER.number(value)
        except READER.error as error:
            READER.refuse(
                error.code.rsplit("-", 1)[1],
                error.what,
                ways_out=[f"write {examples(dimension)}"],
            )
    try:
        return quantity(value, dimension)
    except ValueError as error:
        READER.refuse("UNIT", f"{shown(value)}: {error}")


def read_link(value: Any) -> Link:
    fields = READER.record(value, required=("latency", "bandwidth"))
    return link_of(fields)


def link_of(fields: Mapping[str, Any]) -> Link:
    """A link from the keys `latency` and `bandwidth` of a checked record."""
    with at("latency"):
        latency_s = read_quantity(fields["latency"], "time")
    with at("bandwidth"):
        bandwidth = read_quantity(fields["bandwidth"], "bandwidth")
    return Link(latency_s, bandwidth)


def link_data(link: Link) -> dict[str, Any]:
    return {"latency": link.latency_s, "bandwidth": link.bandwidth}


def read_kind(name: str, value: Any, *, extra: tuple[str, ...] = ()) -> DeviceKind:
    """A kind from its record; `extra` keys are allowed and not read."""
    fields = READER.record(
        value,
        required=("peak_flops", "memory", "memory_bandwidth"),
        optional=("capabilities", "link", "source", *extra),
    )
    with at("peak_flops"):
        rates = READER.values(fields["peak_flops"], lambda rate: read_quantity(rate, "flops"))
    with at("memory"):
        memory_bytes = read_quantity(fields["memory"], "bytes")
    with at("memory_bandwidth"):
        memory_bandwidth = read_quantity(fields["memory_bandwidth"], "bandwidth")
    with at("capabilities"):
        capabilities = READER.items(fields.get("capabilities", []), READER.text)
    with at("link"):
        link = read_link(fields["link"]) if "link" in fields else None
    with at("source"):
        source = READER.text(fields.get("source", ""))
    return DeviceKind(
        name=name,
        peak_flops=rates,
        memory_bytes=int(memory_bytes),
        memory_bandwidth=memory_bandwidth,
        capabilities=frozenset(capabilities),
        link=link,
        source=source,
    )


def kind_data(kind: DeviceKind) -> dict[str, Any]:
    data: dict[str, Any] = {
        "peak_flops": dict(kind.peak_flops),
        "memory": kind.memory_bytes,
        "memory_bandwidth": kind.memory_bandwidth,
    }
    if kind.capabilities:
        data["capabilities"] = sorted(kind.capabilities)
    if kind.link:
        data["link"] = link_data(kind.link)
    if kind.source:
        data["source"] = kind.source
    return data
