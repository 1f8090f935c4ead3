"""The one-line form of a plan: "fast[4](data=2,model=2): 0-13 | slow: 14-24". No JAX.

    plan   = stage ("|" stage)*
    stage  = place ("+" place)* ":" layers         several places: data-parallel replicas
    place  = GROUP ["[" devices "]"] ["(" axis "=" size ("," axis "=" size)* ")"]
    devices = COUNT | range ("," range)*           [4]: the group's next four unused devices;
    range  = FIRST "-" LAST                        [0-1,6-7]: these; nothing: all that are left
                                                   (a range may be an earlier stage's whole place
                                                   once more, with its mesh: stages interleave)
    layers = LAYER | FIRST "-" LAST                inclusive; from 0 to the last, without gaps

Without a mesh in brackets the devices are one axis called "data".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hetpass.ir.cluster import Cluster
from hetpass.ir.quantities import counted
from hetpass.ir.records import at, nearest, shown
from hetpass.ir.stage_plan import READER, Replica, StagePlan

MAX_TEXT = 100_000

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)"
    r"|(?P<number>[0-9]{1,9})(?![0-9])|(?P<mark>[|+:\[\](),=-]))"
)


@dataclass(frozen=True)
class _Token:
    text: str
    sort: str
    position: int


def parse_stages(text: str, cluster: Cluster, num_layers: int) -> tuple[StagePlan, ...]:
    """Reads the one-line form; every layer and no device twice.

    Raises:
      PlanError: HP-PLAN-TEXT and others, with the position of the character.
    """
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        READER.refuse("TEXT", f"a plan is a text of at most {MAX_TEXT} characters")
    check_place(cluster, num_layers)
    return _Parser(text, cluster, num_layers).plan()


def check_place(cluster: Any, num_layers: Any) -> None:
    """Refuses what is no cluster, and what is no number of layers."""
    if not isinstance(cluster, Cluster):
        READER.refuse("TYPE", f"a Cluster is needed, not {shown(cluster)}", "cluster",
                      ways_out=['hp.Cluster.from_file("cluster.toml")'])  # fmt: skip
    with at("num_layers"):
        if READER.integer(num_layers) < 1:
            READER.refuse("LAYERS", f"a plan is for one layer or more, not {num_layers}",
                          ways_out=["traced.plan().num_layers"])  # fmt: skip


class _Parser:
    """Reads tokens from left to right, and keeps which devices are not used yet."""

    def __init__(self, text: str, cluster: Cluster, num_layers: int) -> None:
        self.text = text
        self.cluster = cluster
        self.num_layers = num_layers
        self.tokens = self._tokens()
        self.next = 0
        self.unused = {g.name: list(range(g.num_devices)) for g in cluster.groups}
        self.places: set[Replica] = set()

    # -- tokens -------------------------------------------------------------------------------

    def _tokens(self) -> list[_Token]:
        tokens = []
        position = 0
        end = len(self.text.rstrip())
        while position < end:
            match = _TOKEN.match(self.text, position)
            if match is None:
                start = position + len(self.text[position:]) - len(self.text[position:].lstrip())
                self.refuse("TEXT", f"{shown(self.text[start])} has no meaning here", start)
            sort = str(match.lastgroup)
            tokens.append(_Token(match.group(sort), sort, match.start(sort)))
            position = match.end()
        tokens.append(_Token("", "end", len(self.text)))
        return tokens

    def refuse(
        self,
        word: str,
        what: str,
        position: int,
        details: tuple[str, ...] = (),
        ways_out: tuple[str, ...] = (),
    ) -> NoReturn:
        start = max(0, position - 40)
        excerpt = self.text[start : position + 30]
        pointed = (excerpt, " " * (position - start) + "^") if excerpt.isprintable() else ()
        READER.refuse(
            word,
            what,
            f"character {position + 1} of the plan",
            details=(*pointed, *details),
            ways_out=ways_out,
        )

    def take(self, wanted: str) -> _Token:
        """The next token, which must be the mark `wanted`, or of that sort."""
        token = self.tokens[self.next]
        if token.text != wanted and token.sort != wanted:
            found = shown(token.text) if token.text else "the end"
            named = {"name": "a name", "number": "a number", "end": "the end"}
            self.refuse(
                "TEXT",
                f"{named.get(wanted, repr(wanted))} is needed, not {found}",
                token.position,
                ways_out=('write "GROUP[devices](axis=size): first-last | ..."',),
            )
        self.next += 1
        return token

    def accept(self, mark: str) -> bool:
        if self.tokens[self.next].text != mark:
            return False
        self.next += 1
        return True

    # -- grammar ------------------------------------------------------------------------------

    def plan(self) -> tuple[StagePlan, ...]:
        stages = [self.stage(0)]
        while self.accept("|"):
            stages.append(self.stage(stages[-1].last_layer + 1))
        end = self.take("end")
        if stages[-1].last_layer != self.num_layers - 1:
            self.refuse(
                "LAYERS",
                f"the stages end at layer {stages[-1].last_layer}, the last layer is "
                f"{self.num_layers - 1}",
                end.position,
                ways_out=(f"let the last stage end at {self.num_layers - 1}",),
            )
        return tuple(stages)

    def stage(self, start: int) -> StagePlan:
        places = [self.place()]
        while self.accept("+"):
            places.append(self.place())
        self.take(":")
        first, last = self.layers(start)
        return StagePlan(first, last, tuple(places))

    def layers(self, start: int) -> tuple[int, int]:
        first_token = self.take("number")
        first = last = int(first_token.text)
        last_token = first_token
        if self.accept("-"):
            last_token = self.take("number")
            last = int(last_token.text)
        if first != start:
            self.refuse(
                "LAYERS",
                f"the stage starts at layer {first}, and layer {start} is the next one",
                first_token.position,
                ways_out=(f"start the stage at {start}",),
            )
        if not first <= last < self.num_layers:
            self.refuse(
                "LAYERS",
                f"the stage ends at layer {last}",
                last_token.position,
                details=(f"the program has the layers 0 to {self.num_layers - 1}",),
                ways_out=(f"end it between {first} and {self.num_layers - 1}",)
                if first < self.num_layers
                else (),
            )
        return first, last

    def place(self) -> Replica:
        group = self.take("name")
        if group.text not in self.unused:
            self.refuse(
                "GROUP",
                f"the cluster has no group {shown(group.text)}",
                group.position,
                ways_out=nearest(group.text, self.unused),
            )
        after = self.tokens[min(self.next + 1, len(self.tokens) - 1)]
        devices = self.devices(group)
        place = Replica(group.text, devices, self.mesh(len(devices)))
        if place not in self.places:
            self._take_devices(place, after.position)
        self.places.add(place)
        return place

    def _take_devices(self, place: Replica, position: int) -> None:
        unused = self.unused[place.group]
        taken = [device for device in place.devices if device not in unused]
        if taken:
            self.refuse(
                "DEVICES",
                f"device {taken[0]} of {place.group!r} is used by an earlier stage",
                position,
                ways_out=(
                    f"unused: {range_text(unused)}",
                    "interleave: repeat an earlier stage's devices and mesh exactly",
                ),
            )
        for device in place.devices:
            unused.remove(device)

    def devices(self, group: _Token) -> tuple[int, ...]:
        free = self.unused[group.text]
        if not self.accept("["):
            if not free:
                self._refuse_devices(group, group.position, 1)
            return tuple(free)
        number = self.take("number")
        if self.accept("]"):
            count = int(number.text)
            if not 1 <= count <= len(free):
                self._refuse_devices(group, number.position, count)
            return tuple(free[:count])
        devices = list(self.device_range(group, number))
        while self.accept(","):
            devices += self.device_range(group, self.take("number"))
        self.take("]")
        if len(set(devices)) != len(devices):
            self.refuse("DEVICES", "a device stands twice in one place", number.position)
        return tuple(devices)

    def device_range(self, group: _Token, first: _Token) -> tuple[int, ...]:
        last = self.take("number") if self.accept("-") else first
        size = self.cluster.group(group.text).num_devices
        if not int(first.text) <= int(last.text) < size:
            self.refuse(
                "DEVICES",
                f"the group {group.text!r} has the devices 0 to {size - 1}",
                last.position,
            )
        return tuple(range(int(first.text), int(last.text) + 1))

    def _refuse_devices(self, group: _Token, position: int, wanted: int) -> NoReturn:
        free = len(self.unused[group.text])
        size = self.cluster.group(group.text).num_devices
        self.refuse(
            "DEVICES",
            f"{counted(wanted, 'device')} of {group.text!r} are wanted, {free} are unused",
            position,
            details=(
                f"the group has {counted(size, 'device')}, {size - free} are used by earlier "
                "stages",
            ),
            ways_out=(f"take between 1 and {free}",) if free else ("use another group",),
        )

    def mesh(self, num_devices: int) -> tuple[tuple[str, int], ...]:
        opening = self.tokens[self.next].position
        if not self.accept("("):
            return (("data", num_devices),)
        axes: dict[str, int] = {}
        while True:
            name = self.take("name")
            self.take("=")
            size = self.take("number")
            if name.text in axes:
                self.refuse("MESH", f"the axis {name.text!r} stands twice", name.position)
            if int(size.text) < 1:
                self.refuse("MESH", "an axis has at least one device", size.position)
            axes[name.text] = int(size.text)
            if not self.accept(","):
                break
        self.take(")")
        product = math.prod(axes.values())
        if product != num_devices:
            self.refuse(
                "MESH",
                f"the mesh holds {counted(product, 'device')}, the stage has {num_devices}",
                opening,
                ways_out=(f"data={num_devices}", f"take [{product}] devices"),
            )
        return tuple(axes.items())


def range_text(numbers: list[int] | tuple[int, ...]) -> str:
    """Numbers as ranges, in the order given: (0, 1, 2, 6) is "0-2,6-6"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" for first, last in ranges)


def place_text(place: Replica, used: Mapping[str, set[int]]) -> str:
    """One place; the short count where the devices are the group's next unused ones.

    Devices that are used already (stages interleave) are written out.
    """
    taken = used.get(place.group, set())
    following: list[int] = []
    candidate = 0
    while len(following) < len(place.devices):
        if candidate not in taken:
            following.append(candidate)
        candidate += 1
    counted = tuple(following) == place.devices
    devices = str(len(place.devices)) if counted else range_text(place.devices)
    return f"{place.group}[{devices}]{mesh_text(place)}"


def mesh_text(place: Replica) -> str:
    """ "(data=2,model=2)"; nothing for a data axis alone."""
    if place.mesh == (("data", len(place.devices)),):
        return ""
    return f"({','.join(f'{name}={size}' for name, size in place.mesh)})"


def stages_text(stages: tuple[StagePlan, ...]) -> str:
    """The inverse of `parse_stages`."""
    used: dict[str, set[int]] = {}
    texts = []
    for stage in stages:
        places = []
        for place in stage.replicas:
            places.append(place_text(place, used))
            used.setdefault(place.group, set()).update(place.devices)
        single = stage.first_layer == stage.last_layer
        layers = str(stage.first_layer) if single else f"{stage.first_layer}-{stage.last_layer}"
        texts.append(f"{' + '.join(places)}: {layers}")
    return " | ".join(texts)
