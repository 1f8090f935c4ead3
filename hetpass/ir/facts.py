"""ProgramFacts: what the planner knows about a program, as numbers. No JAX.

Everything that depends on the microbatch is an `Amount`: a part that every microbatch has, and a
part per example. The facts are of the whole program on one device; how a layer is shared among
devices is the cost model's business (`hetpass.cost`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hetpass.errors import FactsError
from hetpass.ir.devices import DTYPES
from hetpass.ir.frozen import Frozen
from hetpass.ir.profile import ModelProfile
from hetpass.ir.quantities import counted
from hetpass.ir.records import Reader, at, nearest, place, shown

READER = Reader(FactsError, "HP-FACTS")

FORMAT = "hetpass-facts/1"


@dataclass(frozen=True)
class Amount:
    """`per_microbatch + examples · per_example`, in any unit.

    `Amount(2.0, 0.5).of(8)` is 6.0.
    """

    per_microbatch: float = 0.0
    per_example: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_microbatch", "per_example"):
            with at(name):
                value = READER.number(getattr(self, name))
                if value < 0:
                    READER.refuse("VALUE", f"a number of zero or more is needed, not {value!r}")
            object.__setattr__(self, name, float(value))

    def of(self, examples: float) -> float:
        """The amount in a microbatch of so many examples."""
        return self.per_microbatch + examples * self.per_example


ZERO = Amount()


@dataclass(frozen=True)
class Seconds:
    """Forward and backward seconds of a layer on one device, where they are known."""

    forward: Amount
    backward: Amount


@dataclass(frozen=True)
class LayerFacts:
    """One layer: the smallest unit that moves between stages.

    Attributes:
      kind: equal layers have equal kinds ("attention", "mlp").
      forward_flops, backward_flops: by number format.
      forward_traffic_bytes, backward_traffic_bytes: read from and written to device memory, beside
        parameters and their gradients, which are counted once a microbatch.
      parameter_bytes: as the layer reads them.
      state_bytes: master copy and optimizer state.
      gradient_bytes: the accumulators, full size.
      batch_bytes: inputs and results of the whole batch that lie with the layer all the time,
        shared out over data parallel devices.
      activation_bytes: held from forward to backward.
      workspace_bytes: needed while the layer runs, and no longer.
      boundary_bytes: what the next layer reads of this and earlier layers.
      gradient_boundary_bytes: what comes back.
      reduced_bytes: activations that tensor parallelism sums over devices, in forward, and as many
        in backward; zero where the layer has none.
      most_tensor_parallel: tensor parallelism over more devices is not possible.
      seconds: on one device, by the name of a device group or else of a device kind; they override
        FLOPs and traffic.
    """

    kind: str
    forward_flops: Mapping[str, Amount] = field(default_factory=dict, hash=False)
    backward_flops: Mapping[str, Amount] = field(default_factory=dict, hash=False)
    forward_traffic_bytes: Amount = ZERO
    backward_traffic_bytes: Amount = ZERO
    parameter_bytes: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    batch_bytes: float = 0.0
    activation_bytes: Amount = ZERO
    workspace_bytes: Amount = ZERO
    boundary_bytes: Amount = ZERO
    gradient_boundary_bytes: Amount = ZERO
    reduced_bytes: Amount = ZERO
    most_tensor_parallel: int = 1
    seconds: Mapping[str, Seconds] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        with at("kind"):
            READER.text(self.kind)
        for name in ("parameter_bytes", "state_bytes", "gradient_bytes", "batch_bytes"):
            with at(name):
                value = READER.number(getattr(self, name))
                if value < 0:
                    READER.refuse("VALUE", f"bytes are zero or more, not {shown(value)}")
        for name in ("forward_flops", "backward_flops"):
            flops = dict(getattr(self, name))
            for dtype in flops:
                if dtype not in DTYPES:
                    READER.refuse(
                        "DTYPE",
                        f"{shown(dtype)} is no number format that a rate can be given for",
                        f"{name}.{place(str(dtype))}",
                        ways_out=nearest(dtype, DTYPES),
                    )
            ordered = {dtype: flops[dtype] for dtype in DTYPES if dtype in flops}
            object.__setattr__(self, name, Frozen(ordered))
        with at("most_tensor_parallel"):
            if READER.integer(self.most_tensor_parallel) < 1:
                READER.refuse("VALUE", "a count of 1 or more is needed")
        object.__setattr__(self, "seconds", Frozen(sorted(self.seconds.items())))

    @property
    def dtypes(self) -> frozenset[str]:
        """The number formats that the layer computes in."""
        return frozenset(self.forward_flops) | frozenset(self.backward_flops)


_AMOUNTS = tuple(f.name for f in fields(LayerFacts) if f.type == "Amount")


@dataclass(frozen=True)
class SharedBytes:
    """What two layers both count, and a stage that has both holds once.

    Where three layers or more share a value, each is paired with the next one that does: a stage of
    consecutive layers then saves as often as it has more than one of them.

    Attributes:
      first, second: layers, in order.
      activation_bytes: held from forward to backward.
      held_bytes: parameters and accumulators.
    """

    first: int
    second: int
    activation_bytes: Amount = ZERO
    held_bytes: float = 0.0


@dataclass(frozen=True, repr=False)
class ProgramFacts:
    """A program of L layers, in order.

    Attributes:
      layers: at least one.
      batch_size: B, examples in a step.
      fingerprint: of the program; None: of no program in particular.
      shared: what layers count twice.
      profile: measured seconds and bytes of every layer; where a device kind is in it, they go
        before all else that is known of the layers.

    Raises:
      FactsError: HP-FACTS-…, with the path of the value that is wrong.
    """

    layers: tuple[LayerFacts, ...]
    batch_size: int
    fingerprint: str | None = None
    shared: tuple[SharedBytes, ...] = ()
    profile: ModelProfile | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "shared", tuple(self.shared))
        if not self.layers:
            READER.refuse("LAYERS", "a program has at least one layer", "layers")
        for index, pair in enumerate(self.shared):
            if not 0 <= pair.first < pair.second < len(self.layers):
                READER.refuse(
                    "LAYERS",
                    f"two layers in order are needed, not {pair.first} and {pair.second}",
                    f"shared[{index}]",
                )
        if self.profile is not None and self.profile.num_layers != len(self.layers):
            READER.refuse(
                "LAYERS",
                f"the profile has {counted(self.profile.num_layers, 'layer')}, the facts "
                f"{len(self.layers)}",
                "profile",
            )
        with at("batch_size"):
            if READER.integer(self.batch_size) < 1:
                READER.refuse("VALUE", "at least one example is needed")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @cached_property
    def distinct(self) -> tuple[tuple[LayerFacts, ...], tuple[int, ...]]:
        """The layers that differ, and for every layer which of them it equals."""
        places: dict[LayerFacts, int] = {}
        of = tuple(places.setdefault(layer, len(places)) for layer in self.layers)
        return tuple(places), of

    @classmethod
    def synthetic(
        cls, layers: Sequence[LayerFacts | Mapping[str, Any]], batch_size: int
    ) -> ProgramFacts:
        """Facts from short records, for tests and research.

        A record has the fields of `LayerFacts`; where an `Amount` is needed, a number is meant per
        example. Seconds are given by group or device kind, of forward and backward:

            ProgramFacts.synthetic(6 * [{"seconds": {"fast": (0.2, 0.3), "slow": (0.4, 0.6)}}], 8)

        FLOPs by number format: `{"forward_flops": {"float16": 2e12}, …}`.
        """
        return cls(
            tuple(
                layer if isinstance(layer, LayerFacts) else _short(layer, index)
                for index, layer in enumerate(layers)
            ),
            batch_size,
        )

    @classmethod
    def from_profiles(cls, folder: str | Path, model: str, batch_size: int) -> ProgramFacts:
        """Facts from measured seconds and bytes of layers, without a program.

        Args:
          folder: `layer_bytes.json` and `profiles/MODEL__KIND.json` (see `ir.profile`). Seconds
            that a larger microbatch contradicts are left out.
          model: its name there.

        Raises:
          FactsError: HP-PROFILE-…
        """
        profile = ModelProfile.read(folder, model).settled()
        ways, sizes = next(iter(profile.sizes.items()))
        most = max(profile.sizes)
        last = len(sizes) - 1
        layers = tuple(
            LayerFacts(
                "embedding" if index == 0 else "head" if index == last else "block",
                parameter_bytes=ways * size.parameter_bytes,
                state_bytes=2 * ways * size.parameter_bytes,
                gradient_bytes=ways * size.parameter_bytes,
                activation_bytes=Amount(0.0, ways * size.held_bytes),
                boundary_bytes=Amount(0.0, size.output_bytes),
                gradient_boundary_bytes=Amount(0.0, size.output_bytes),
                most_tensor_parallel=most,
            )
            for index, size in enumerate(sizes)
        )
        return cls(layers, batch_size, profile=profile)

    # -- JSON ---------------------------------------------------------------------------------

    def to_json(self) -> str:
        """JSON text; equal facts give equal bytes."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "batch_size": self.batch_size,
            "fingerprint": self.fingerprint,
            "layers": [_layer_data(layer) for layer in self.layers],
            "shared": [
                [p.first, p.second, _amount_data(p.activation_bytes), p.held_bytes]
                for p in self.shared
            ],
        }
        if self.profile is not None:
            data["profile"] = self.profile.to_data()
        return json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ProgramFacts:
        """The facts in a JSON text. Nothing in it is ever executed."""
        return cls._from_data(READER.parse(READER.text(text), ".json"))

    @classmethod
    def _from_data(cls, given: Any) -> ProgramFacts:
        data = READER.record(
            given,
            required=("format", "batch_size", "layers"),
            optional=("fingerprint", "shared", "profile"),
        )
        if data["format"] != FORMAT:
            READER.refuse(
                "FORMAT",
                f"the format {shown(data['format'])} is not read here",
                "format",
                ways_out=[f"this version reads {FORMAT!r}"],
            )
        with at("layers"):
            layers = READER.items(data["layers"], _read_layer)
        with at("shared"):
            shared = READER.items(data.get("shared", []), _read_shared)
        profile = None
        if data.get("profile") is not None:
            with at("profile"):
                profile = ModelProfile.from_data(data["profile"])
        return cls(layers, data["batch_size"], data.get("fingerprint"), shared, profile)

    def save(self, path: str | Path) -> None:
        """Writes the facts as a JSON file."""
        READER.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> ProgramFacts:
        """Reads facts from a `.json` file."""
        data = READER.load(path, (".json",))
        with at(f"{path}:"):
            return cls._from_data(data)

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for layer in self.layers:
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
        rows = [f"  {count} x {kind}" for kind, count in kinds.items()]
        return "\n".join([f"facts: {self._head}", *rows])

    def __repr__(self) -> str:
        return f"<ProgramFacts: {self._head}>"

    @property
    def _head(self) -> str:
        return f"{counted(self.num_layers, 'layer')}, batch of {self.batch_size}"


def _short(record: Mapping[str, Any], index: int) -> LayerFacts:
    with at(f"layers[{index}]"):
        known = {f.name for f in fields(LayerFacts)}
        for key in record:
            if key not in known:
                READER.refuse(
                    "KEY", f"{shown(key)} is no fact of a layer", ways_out=nearest(key, known)
                )
        values = dict(record)
        values.setdefault("kind", "layer")
        for name in _AMOUNTS:
            if name in values:
                values[name] = _amount(values[name])
        for name in ("forward_flops", "backward_flops"):
            values[name] = {d: _amount(a) for d, a in values.get(name, {}).items()}
        values["seconds"] = {
            name: pair if isinstance(pair, Seconds) else Seconds(_amount(pair[0]), _amount(pair[1]))
            for name, pair in values.get("seconds", {}).items()
        }
        return LayerFacts(**values)


def _amount(value: Any) -> Amount:
    return value if isinstance(value, Amount) else Amount(0.0, value)


def _amount_data(amount: Amount) -> list[float]:
    return [amount.per_microbatch, amount.per_example]


def _layer_data(layer: LayerFacts) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for f in fields(LayerFacts):
        value = getattr(layer, f.name)
        if isinstance(value, Amount):
            value = _amount_data(value)
        elif f.name in ("forward_flops", "backward_flops"):
            value = {dtype: _amount_data(a) for dtype, a in value.items()}
        elif f.name == "seconds":
            value = {
                name: [_amount_data(s.forward), _amount_data(s.backward)]
                for name, s in value.items()
            }
        data[f.name] = value
    return data


def _read_amount(value: Any) -> Amount:
    numbers = READER.items(value, READER.number)
    if len(numbers) != 2:
        READER.refuse("VALUE", "an amount is a number per microbatch and one per example")
    return Amount(*numbers)


def _read_shared(value: Any) -> SharedBytes:
    parts = READER.items(value, lambda part: part)
    if len(parts) != 4:
        READER.refuse("VALUE", "two layers, an amount of activations and held bytes are needed")
    first, second = (READER.integer(part) for part in parts[:2])
    return SharedBytes(first, second, _read_amount(parts[2]), READER.number(parts[3]))


def _read_seconds(value: Any) -> Seconds:
    amounts = READER.items(value, _read_amount)
    if len(amounts) != 2:
        READER.refuse("VALUE", "seconds are a forward and a backward amount")
    return Seconds(*amounts)


def _read_layer(value: Any) -> LayerFacts:
    names = tuple(f.name for f in fields(LayerFacts))
    record = dict(READER.record(value, required=("kind",), optional=names[1:]))
    for name in _AMOUNTS:
        if name in record:
            with at(name):
                record[name] = _read_amount(record[name])
    for name in ("forward_flops", "backward_flops"):
        if name in record:
            with at(name):
                record[name] = READER.values(record[name], _read_amount)
    if "seconds" in record:
        with at("seconds"):
            record["seconds"] = READER.values(record["seconds"], _read_seconds)
    return LayerFacts(**record)
