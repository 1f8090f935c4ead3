"""ModelProfile: layer seconds and bytes that were measured, as plain data. No JAX.

Seconds depend on the microbatch and on tensor parallelism in ways of their own (small layers cost
what it takes to launch them), so a profile is a table, not a formula:

    {"model": "OPT-350", "device": "V100-16",
     "seconds": {"4": {"1": [[0.0005, 0.0, 0.005], [0.029, 0.07, 0.005], …], "2": …}, …}}

is one device kind: by examples in a microbatch, then by tensor parallelism, for every layer
forward, backward and update. Bytes, for one example, are a second file:

    {"OPT-350": {"1": [{"params_bytes": 214433792, "act_output_bytes": 8388608,
                        "act_input_bytes": 4227072, "act_mem_bytes": 8388608}, …], "2": …}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpass.errors import FactsError
from hetpass.ir.frozen import Frozen
from hetpass.ir.quantities import counted
from hetpass.ir.records import Reader, at, nearest, shown

READER = Reader(FactsError, "HP-PROFILE")


@dataclass(frozen=True)
class LayerTime:
    """Of one layer on one device of a row of tensor parallelism.

    Attributes:
      forward_s, backward_s: per microbatch, the row's sums of activations included.
      update_s: of the optimizer, once per step.
    """

    forward_s: float
    backward_s: float
    update_s: float

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "update_s"):
            with at(name):
                _check_number(getattr(self, name))


@dataclass(frozen=True)
class LayerSize:
    """Of one layer, on each device of a row of tensor parallelism.

    Attributes:
      parameter_bytes: of its share.
      output_bytes: that the next layer reads, for one example.
      held_bytes: from forward to backward, for one example.
    """

    parameter_bytes: float
    output_bytes: float
    held_bytes: float

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "output_bytes", "held_bytes"):
            with at(name):
                _check_number(getattr(self, name))


Setting = tuple[int, int]
"""Examples in a microbatch, and devices of a row of tensor parallelism."""

Times = Mapping[Setting, tuple[LayerTime, ...]]


@dataclass(frozen=True)
class ModelProfile:
    """What was measured of a model.

    Attributes:
      model: its name.
      seconds: by device kind, then by setting; every layer.
      sizes: by tensor parallelism; every layer.

    Raises:
      FactsError: HP-PROFILE-…, with the path of the value that is wrong.
    """

    model: str
    seconds: Mapping[str, Times] = field(hash=False)
    sizes: Mapping[int, tuple[LayerSize, ...]] = field(hash=False)

    def __post_init__(self) -> None:
        with at("model"):
            READER.text(self.model)
        if not self.seconds or not self.sizes:
            READER.refuse("VALUE", "a profile holds seconds and bytes", "seconds")
        count = self.num_layers
        if count < 1:
            READER.refuse("LAYERS", "a profile has at least one layer", "sizes")
        for ways, sizes in self.sizes.items():
            self._check_count(len(sizes), count, f"sizes[{ways}]")
        for kind, times in self.seconds.items():
            if not times:
                READER.refuse("VALUE", f"nothing was measured on {kind!r}", "seconds")
            for setting, layers in times.items():
                self._check_count(len(layers), count, f"seconds[{kind}][{setting}]")
        frozen = {k: Frozen(sorted(t.items())) for k, t in self.seconds.items()}
        object.__setattr__(self, "seconds", Frozen(sorted(frozen.items())))
        object.__setattr__(self, "sizes", Frozen(sorted(self.sizes.items())))

    def _check_count(self, found: int, wanted: int, where: str) -> None:
        if found != wanted:
            READER.refuse(
                "LAYERS",
                f"{counted(found, 'layer')} here, and {wanted} elsewhere in the profile of "
                f"{self.model!r}",
                where,
                ways_out=["give every table one entry per layer of the same model"],
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(next(iter(self.sizes.values())))

    def examples(self, kind: str, ways: int) -> tuple[int, ...]:
        """The microbatches that were measured on a device kind, smallest first."""
        return tuple(b for b, w in self.seconds.get(kind, {}) if w == ways)

    def ways(self, kind: str) -> tuple[int, ...]:
        """The degrees of tensor parallelism that were measured and whose bytes are known."""
        return tuple(sorted({w for _, w in self.seconds.get(kind, {})} & set(self.sizes)))

    def times(self, kind: str, ways: int, examples: float) -> tuple[LayerTime, ...] | None:
        """Every layer for a microbatch; None where the kind was not measured so far.

        Between two measured microbatches seconds are interpolated; there is no value beyond the
        largest, and below the smallest the smallest holds.
        """
        known = self.examples(kind, ways)
        if not known or examples > known[-1]:
            return None
        table = self.seconds[kind]
        above = next(b for b in known if b >= examples)
        below = max((b for b in known if b <= examples), default=above)
        if above == below:
            return table[above, ways]
        share = (examples - below) / (above - below)
        pairs = zip(table[below, ways], table[above, ways], strict=True)
        return tuple(_between(one, other, share) for one, other in pairs)

    def settled(self) -> ModelProfile:
        """Without measurements that a larger microbatch contradicts.

        A microbatch of one example launches the kernels of one of two, and computes less: where it
        was measured slower, that was noise of the measurement, and the larger one's seconds hold.
        """
        return ModelProfile(
            self.model,
            {
                kind: {
                    (b, w): _least([times[c, v] for c, v in times if v == w and c >= b])
                    for b, w in times
                }
                for kind, times in self.seconds.items()
            },
            self.sizes,
        )

    def to_data(self) -> dict[str, Any]:
        """Plain data, as `from_data` reads it."""
        seconds: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
        for kind, times in self.seconds.items():
            for (b, w), layers in times.items():
                rows = [[t.forward_s, t.backward_s, t.update_s] for t in layers]
                seconds.setdefault(kind, {}).setdefault(str(b), {})[str(w)] = rows
        sizes = {
            str(w): [
                {
                    "params_bytes": size.parameter_bytes,
                    "act_output_bytes": size.output_bytes,
                    "act_mem_bytes": size.held_bytes,
                }
                for size in layers
            ]
            for w, layers in self.sizes.items()
        }
        return {"model": self.model, "seconds": seconds, "bytes": sizes}

    @classmethod
    def from_data(cls, data: Any) -> ModelProfile:
        """The inverse of `to_data`."""
        record = READER.record(data, required=("model", "seconds", "bytes"))
        with at("bytes"):
            sizes = READER.values(record["bytes"], lambda rows: READER.items(rows, _read_size))
        kinds = READER.mapping(record["seconds"])
        return cls(
            record["model"],
            {kind: _read_times(times) for kind, times in kinds.items()},
            {_count(w): layers for w, layers in sizes.items()},
        )

    @classmethod
    def read(cls, folder: str | Path, model: str) -> ModelProfile:
        """The profile of a model in a folder: `layer_bytes.json` and `profiles/MODEL__KIND.json`.

        Raises:
          FactsError: HP-PROFILE-…; -FILE where the model is not there.
        """
        root = Path(folder)
        found: dict[str, Times] = {}
        for path in sorted((root / "profiles").glob(f"{model}__*.json")):
            data = READER.load(path, (".json",))
            with at(f"{path}:"):
                record = READER.record(data, required=("model", "device", "seconds"))
                found[READER.text(record["device"])] = _read_times(record["seconds"])
        sizes = READER.values(
            READER.load(root / "layer_bytes.json", (".json",)),
            lambda rows: READER.values(rows, lambda layers: READER.items(layers, _read_size)),
        )
        if not found or model not in sizes:
            READER.refuse(
                "FILE",
                f"there is no profile of {shown(model)}",
                str(root),
                ways_out=nearest(model, sizes),
            )
        return cls(model, found, {_count(w): s for w, s in sizes[model].items()})


def _between(one: LayerTime, other: LayerTime, share: float) -> LayerTime:
    return LayerTime(
        one.forward_s + share * (other.forward_s - one.forward_s),
        one.backward_s + share * (other.backward_s - one.backward_s),
        one.update_s + share * (other.update_s - one.update_s),
    )


def _least(tables: Sequence[tuple[LayerTime, ...]]) -> tuple[LayerTime, ...]:
    return tuple(
        LayerTime(
            min(t.forward_s for t in layer), min(t.backward_s for t in layer), layer[0].update_s
        )
        for layer in zip(*tables, strict=True)
    )


def _check_number(value: Any) -> None:
    if READER.number(value) < 0:
        READER.refuse("VALUE", f"a number of zero or more is needed, not {shown(value)}")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        READER.refuse("VALUE", f"a count of 1 or more is needed, not {shown(text)}")
    return int(text)


def _read_times(value: Any) -> dict[Setting, tuple[LayerTime, ...]]:
    with at("seconds"):
        rows = READER.values(
            value,
            lambda by_ways: READER.values(by_ways, lambda row: READER.items(row, _read_time)),
        )
        return {(_count(b), _count(w)): row for b, ways in rows.items() for w, row in ways.items()}


def _read_time(value: Any) -> LayerTime:
    numbers = READER.items(value, READER.number)
    if len(numbers) != 3:
        READER.refuse("VALUE", "seconds of forward, backward and update are needed")
    return LayerTime(*numbers)


def _read_size(value: Any) -> LayerSize:
    record = READER.record(
        value,
        required=("params_bytes", "act_output_bytes", "act_mem_bytes"),
        optional=("act_input_bytes",),
    )
    return LayerSize(record["params_bytes"], record["act_output_bytes"], record["act_mem_bytes"])
