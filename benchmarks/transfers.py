"""Arrays between meshes of unlike shapes: planned parcels against naive sends, over a slow link.

    python benchmarks/transfers.py [--mbits 400] [--out benchmarks/results/transfers.json]

Places are threads with TCP connections between them; the connections between the two groups carry
so many megabits a second and no more, those inside a group are not slowed. *Naive* sends every
device of the target its whole shard, as plain send and receive do. Told are the bytes over the slow
link and inside the receiving group, the least that can cross, and the median seconds of a move.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from hetpass.backend.pieces import elements, intersection, mesh_boxes, relative
from hetpass.backend.routes import Parcel, Route, Side, route
from hetpass.runtime.transport.message import ONCE, Message, Slowness
from hetpass.runtime.transport.tcp import TcpTransport

DEFAULT_OUT = Path(__file__).resolve().parent / "results" / "transfers.json"
SHAPE = (1024, 1024)
REPEATS = 5
TOKEN = b"one process"


@dataclass(frozen=True)
class End:
    """A mesh, a sharding on it, and how many devices each host has.

    Attributes:
      sizes: of the mesh's axes "a", "b"; names: per dimension of the array.
    """

    sizes: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    per_host: int

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip("ab", self.sizes, strict=False))

    def side(self, first_place: int) -> Side:
        boxes = mesh_boxes(self.names, self.axes, SHAPE)
        return Side(boxes, tuple(first_place + i // self.per_host for i in range(len(boxes))))

    def __str__(self) -> str:
        cut = ", ".join("+".join(names) or "-" for names in self.names)
        hosts = -(-int(np.prod(self.sizes)) // self.per_host)
        return f"{'x'.join(map(str, self.sizes))} ({cut}) on {hosts} host{'s' * (hosts > 1)}"


WHOLE, ROWS, COLUMNS = ((), ()), (("a",), ()), ((), ("a",))
CASES = (
    (End((2,), WHOLE, 2), End((4,), WHOLE, 4)),
    (End((2,), ROWS, 2), End((4,), ROWS, 4)),
    (End((4,), ROWS, 4), End((2,), COLUMNS, 2)),
    (End((3,), WHOLE, 3), End((2, 2), (("a",), ()), 4)),
    (End((4,), COLUMNS, 4), End((6,), WHOLE, 6)),
    (End((1,), WHOLE, 1), End((4,), WHOLE, 2)),
    (End((2,), ROWS, 1), End((4,), WHOLE, 1)),
    (End((2,), ROWS, 1), End((2, 2), (("a",), ("b",)), 2)),
)


def naive_route(source: Side, target: Side) -> Route:
    """Every device of the target is sent its shard by itself."""
    parcels = []
    for box, place in zip(target.boxes, target.places, strict=True):
        seen = set()
        for position, held in enumerate(source.boxes):
            part = intersection(held, box)
            if part is not None and held not in seen:
                seen.add(held)
                sender = source.places[position]
                parcels.append(Parcel(len(parcels), part, position, sender, (place,)))
    return Route(source, target, tuple(parcels))


class Place:
    """A process, as a thread of this one: gets parcels, passes them on, keeps them."""

    def __init__(self, place: int, planned: Route, slowness: dict[int, Slowness]) -> None:
        self.place = place
        self.parcels = {p.number: p for p in planned.parcels if place in p.receivers}
        self.arrived: queue.SimpleQueue[tuple[int, np.ndarray]] = queue.SimpleQueue()
        self.end = TcpTransport(place, self, TOKEN, slowness=slowness)

    def form(self, message: Message) -> tuple[tuple[int, ...], np.dtype]:
        box = self.parcels[message.parcel].box
        return tuple(stop - start for start, stop in box), np.dtype(np.float32)

    def deliver(self, message: Message, value: Any) -> None:
        first, *others = self.parcels[message.parcel].receivers
        if first == self.place:
            for other in others:
                self.end.post(other, message, value, None)
        self.arrived.put((message.parcel, value))

    def fail(self, place: int, reason: str) -> None:
        raise SystemExit(f"place {place}: {reason}")

    def filled(self) -> np.ndarray:
        """Waits for all parcels; what they hold of the array, NaN elsewhere."""
        whole = np.full(SHAPE, np.nan, np.float32)
        for _ in self.parcels:
            number, value = self.arrived.get(timeout=60)
            whole[tuple(slice(*span) for span in self.parcels[number].box)] = value
        return whole


def moved(planned: Route, slowness: Slowness) -> float:
    """Median seconds until every place of the target has its shards; checked."""
    sides = set(planned.source.places), set(planned.target.places)
    places = {}
    for place in (*sides[0], *sides[1]):
        slow = dict.fromkeys(sides[place in sides[0]], slowness)
        places[place] = Place(place, planned, slow)
    peers = {number: place.end.address for number, place in places.items()}
    for place in places.values():
        place.end.connect(peers)
    value = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    shards = [value[tuple(slice(*span) for span in box)] for box in planned.source.boxes]
    seconds = []
    for call in range(REPEATS + 1):
        begin = time.perf_counter()
        for parcel in planned.parcels:
            held = planned.source.boxes[parcel.source]
            message = Message(1, call, 0, ONCE, parcel.number)
            part = relative(parcel.box, held)
            places[parcel.sender].end.post(
                parcel.receivers[0], message, shards[parcel.source], part
            )
        found = {number: places[number].filled() for number in sides[1]}
        seconds.append(time.perf_counter() - begin)
        for box, number in zip(planned.target.boxes, planned.target.places, strict=True):
            span = tuple(slice(*s) for s in box)
            np.testing.assert_array_equal(found[number][span], value[span])
    for place in places.values():
        place.end.close()
    return statistics.median(seconds[1:])


def compared(source: End, target: End, slowness: Slowness) -> dict[str, Any]:
    """Both ways to move one array."""
    ends = source.side(0), target.side(100)
    least = elements(((0, SHAPE[0]), (0, SHAPE[1]))) * 4
    row: dict[str, Any] = {"source": str(source), "target": str(target), "least_bytes": least}
    for name, planned in (("planned", route(*ends)), ("naive", naive_route(*ends))):
        row[name] = {
            "slow_link_bytes": planned.crossing_elements * 4,
            "inside_bytes": planned.passed_elements * 4,
            "messages": len(planned.parcels),
            "median_s": round(moved(planned, slowness), 4),
        }
    row["gain"] = round(row["naive"]["median_s"] / row["planned"]["median_s"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbits", type=float, default=400.0, help="per second, each connection")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    args = parser.parse_args()
    slowness = Slowness(bytes_per_s=args.mbits * 1e6 / 8)
    rows = []
    print(
        f"{'from':<22}{'to':<28}{'planned':>10}{'naive':>10}{'planned':>10}{'naive':>10}{'gain':>7}"
    )
    for source, target in CASES:
        row = compared(source, target, slowness)
        rows.append(row)
        planned, naive = row["planned"], row["naive"]
        print(
            f"{row['source']:<22}{row['target']:<28}"
            f"{planned['slow_link_bytes'] / 1e6:>7.1f} MB{naive['slow_link_bytes'] / 1e6:>7.1f} MB"
            f"{planned['median_s']:>8.3f} s{naive['median_s']:>8.3f} s{row['gain']:>7.2f}",
            flush=True,
        )
    result = {
        "machine": {
            "date": datetime.date.today().isoformat(),
            "cpus": os.cpu_count(),
            "load_average_before": round(os.getloadavg()[0], 1),
        },
        "array": {"shape": SHAPE, "dtype": "float32"},
        "mbit_per_s": args.mbits,
        "transfers": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
