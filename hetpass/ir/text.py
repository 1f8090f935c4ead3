"""Program-level values as text: what `print(traced)` and its like show.

One equation a line: `r5 f32[2,8] batched(0) = tanh r4`. Full-batch variables are `f0, f1, …`,
region variables `r0, r1, …`, numbered in the order of their first appearance; literals stand as
they are. Parameters are shown where they are short and say what the equation does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetpass._jax import Atom, JaxprEqn, Literal, Var
from hetpass.ir.quantities import counted, span_text, spelled

if TYPE_CHECKING:
    from hetpass.ir.kinds import Kind
    from hetpass.ir.program import Fragment, Layered, Slot, Staged, StepProgram, Traced

_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
}
_TELLING = (
    "axes",
    "axis",
    "dimension",
    "dimensions",
    "dimension_numbers",
    "new_dtype",
    "new_sizes",
    "permutation",
    "broadcast_dimensions",
    "length",
    "reverse",
    "start_indices",
    "limit_indices",
    "y",
    "name",
)
_MAX_PARAMETER = 48


def aval_text(aval: Any) -> str:
    """`f32[8,16]`; what is not an array as JAX prints it."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return str(aval)
    name = str(aval.dtype)
    return f"{_DTYPES.get(name, name)}[{','.join(str(d) for d in aval.shape)}]"


class _Names:
    """Numbers variables in the order in which they are asked for."""

    def __init__(self, prefix: str, kinds: Mapping[Var, Kind] | None = None) -> None:
        self.prefix = prefix
        self.kinds = kinds or {}
        self.of: dict[Var, str] = {}

    def name(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return _cut(str(atom.val).replace("\n", " "), 16)
        return self.of.setdefault(atom, f"{self.prefix}{len(self.of)}")

    def typed(self, var: Var) -> str:
        kind = f" {self.kinds[var]}" if var in self.kinds else ""
        return f"{self.name(var)} {aval_text(var.aval)}{kind}"

    def equation(self, eqn: JaxprEqn) -> str:
        # Operands first, so that names rise along the program.
        operands = "".join(f" {self.name(atom)}" for atom in eqn.invars)
        results = ", ".join(self.typed(var) for var in eqn.outvars)
        return f"{results} = {eqn.primitive.name}{_parameters(eqn)}{operands}"


def _parameters(eqn: JaxprEqn) -> str:
    shown = []
    for key in _TELLING:
        value = eqn.params.get(key)
        text = str(value)
        if value not in (None, (), False, "") and len(text) <= _MAX_PARAMETER:
            shown.append(f"{key}={text}".replace(" ", ""))
    return "{" + ", ".join(shown) + "}" if shown else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _indented(lines: Iterable[str], by: int = 4) -> list[str]:
    return [" " * by + line for line in lines]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


# -- Traced -----------------------------------------------------------------------------------


def traced(value: Traced) -> str:
    names = _Names("f")
    rows = []
    for var, leaf in zip(value.jaxpr.invars, value.inputs, strict=True):
        notes = [
            f"batch dim {leaf.batch_dim}" if leaf.batch_dim is not None else "",
            "donated" if leaf.donated else "",
        ]
        rows.append(
            (names.name(var), aval_text(leaf.aval), leaf.path, " ".join(filter(None, notes)))
        )
    equations = [names.equation(eqn) for eqn in value.jaxpr.eqns]
    outputs = [
        (names.name(var), aval_text(var.aval), path)
        for var, path in zip(value.jaxpr.outvars, value.out_paths, strict=True)
    ]
    batch = f"batch {value.batch_size}" if value.batch_size is not None else "no batch"
    if value.probes:
        probes = f"probed at {', '.join(f'{i + 2}x' for i in range(len(value.probes)))} the batch"
    else:
        probes = f"no probes: {value.probe_failure}" if value.probe_failure else "no probes"
    return "\n".join(
        [
            f"traced {value.name!r}: {counted(len(rows), 'input')}, "
            f"{counted(len(equations), 'equation')}, "
            f"{counted(len(outputs), 'output')}, {batch}, {probes}",
            "  inputs",
            *_indented(_columns(rows)),
            "  equations",
            *_indented(equations),
            "  outputs",
            *_indented(_columns(outputs)),
        ]
    )


# -- StepProgram ------------------------------------------------------------------------------


def step_program(value: StepProgram) -> str:
    full, region = _program_names(value)
    return "\n".join(
        [
            _program_head("step program", value),
            *_program_start(value, full, region),
            *_indented(region.equation(eqn) for eqn in value.region.eqns),
            *_program_end(value, full, region),
        ]
    )


def _program_names(value: StepProgram) -> tuple[_Names, _Names]:
    full, region = _Names("f"), _Names("r", value.kinds)
    for var in value.traced.jaxpr.invars:
        full.name(var)
    return full, region


def _program_head(what: str, value: StepProgram) -> str:
    batch = value.traced.batch_size
    size = f" of {counted(batch // value.num_microbatches, 'example')}" if batch is not None else ""
    return (
        f"{what} {value.traced.name!r}: {counted(value.num_microbatches, 'microbatch')}{size}; "
        "equations: "
        f"prologue {len(value.prologue)}, region {len(value.region.eqns)}, "
        f"epilogue {len(value.epilogue)}"
    )


def _program_start(value: StepProgram, full: _Names, region: _Names) -> list[str]:
    rows = []
    paths = dict(
        zip(value.traced.jaxpr.invars, (leaf.path for leaf in value.traced.inputs), strict=True)
    )
    prologue = [full.equation(eqn) for eqn in value.prologue]
    for var, source in zip(value.region.invars, value.region_inputs, strict=True):
        sort = type(source).__name__.removesuffix("Input").lower()
        origin = getattr(source, "var", None)
        text = f"{sort} {full.name(origin)} {paths.get(origin, '')}" if origin else "m * b"
        rows.append((region.typed(var), "<-", text))
    return [
        *(["  prologue", *_indented(prologue)] if prologue else []),
        "  region inputs",
        *_indented(_columns(rows)),
        "  region",
    ]


def _program_end(value: StepProgram, full: _Names, region: _Names) -> list[str]:
    rows = []
    result: Any
    for var, result in zip(value.region.outvars, value.region_outputs, strict=True):
        if hasattr(result, "op"):
            how = f"{result.op} in {result.dtype}"
        else:
            how = f"joined along {result.kind}"
        rows.append((region.name(var), how, "->", f"{full.name(result.target)}"))
    epilogue = [full.equation(eqn) for eqn in value.epilogue]
    outputs = [
        (full.name(var), path)
        for var, path in zip(value.outvars, value.traced.out_paths, strict=True)
    ]
    return [
        "  region outputs",
        *_indented(_columns(rows)),
        *(["  epilogue", *_indented(epilogue)] if epilogue else []),
        "  outputs",
        *_indented(_columns(outputs)),
    ]


# -- Layered ----------------------------------------------------------------------------------


def layered(value: Layered) -> str:
    full, region = _program_names(value.program)
    rows: list[tuple[str, ...]] = [("layer", "kind", "forward", "backward", "cut", "name")]
    for layer in range(value.num_layers):
        cut = value.cut_bytes[layer] if layer < value.num_layers - 1 else None
        rows.append(
            (
                str(layer),
                str(value.layer_kinds[layer]),
                spelled(value.forward_flops[layer], "flops").replace("/s", ""),
                spelled(value.backward_flops[layer], "flops").replace("/s", ""),
                "" if cut is None else spelled(cut, "bytes"),
                value.names[layer] + (" (marked)" if layer in value.boundaries else ""),
            )
        )
    start = _program_start(value.program, full, region)
    marked = []
    for eqn, span, backward in zip(
        value.program.region.eqns, value.spans, value.backward, strict=True
    ):
        layers = span_text(span.first, span.last)
        marked.append(f"{'B' if backward else 'F'} {layers:<5} {region.equation(eqn)}")
    return "\n".join(
        [
            f"{_program_head('layered', value.program)}; {counted(value.num_layers, 'layer')} of "
            f"{counted(len(set(value.layer_kinds)), 'kind')}",
            *_indented(_columns(rows), 2),
            *start,
            *_indented(marked),
            *_program_end(value.program, full, region),
        ]
    )


# -- Staged -----------------------------------------------------------------------------------


def staged(value: Staged) -> str:
    fed = {feed.slot: value.layered.program.traced.inputs[feed.input].path for feed in value.feeds}
    lines = [
        f"staged {value.layered.program.traced.name!r}: {counted(value.num_stages, 'stage')}, "
        f"{counted(value.num_microbatches, 'microbatch')}, {counted(len(value.slots), 'slot')}, "
        f"{counted(len(value.fragments), 'fragment')}, {counted(len(value.transfers), 'transfer')}"
    ]
    for stage in range(value.num_stages):
        lines.append(f"  stage {stage}")
        slots = [slot for slot in value.slots if slot.stage == stage]
        rows = [_slot_row(slot, fed.get(slot.index, "")) for slot in slots]
        lines += _indented(_columns(rows))
        for fragment in value.fragments:
            if fragment.stage == stage:
                lines += _indented(_fragment_lines(fragment))
    lines.append("  transfers")
    for transfer in value.transfers:
        source, target = value.slots[transfer.source], value.slots[transfer.target]
        lines.append(
            f"    s{source.index} stage {source.stage} -> s{target.index} stage {target.stage}  "
            f"{aval_text(source.aval)} per {source.scope}  {source.name}"
        )
    lines.append("  results")
    paths = value.layered.program.traced.out_paths
    lines += _indented(
        _columns([(p, _result_text(r)) for p, r in zip(paths, value.results, strict=True)])
    )
    return "\n".join(lines)


def _slot_row(slot: Slot, fed: str) -> tuple[str, ...]:
    stacked = " stacked" if slot.stacked else ""
    return (
        f"s{slot.index}",
        aval_text(slot.aval),
        f"{slot.scope}{stacked}",
        str(slot.kind),
        slot.name,
        f"<- {fed}" if fed else "",
    )


def _fragment_lines(fragment: Fragment) -> list[str]:
    counts = Counter(eqn.primitive.name for eqn in fragment.jaxpr.eqns)
    most = ", ".join(f"{count} {name}" for name, count in counts.most_common(5))
    most += f", … ({counted(counts.total(), 'equation')})" if len(counts) > 5 else ""
    frees = f"  frees {' '.join(f's{s}' for s in fragment.frees)}" if fragment.frees else ""
    return [
        f"{fragment.role} (phase {fragment.phase}): {most or 'no equations'}",
        f"  in  {' '.join(_access_text(access) for access in fragment.inputs)}",
        f"  out {' '.join(_access_text(access) for access in fragment.outputs)}{frees}",
    ]


def _access_text(access: Any) -> str:
    """`s4` for the plain read or write, else what is done with the slot: `s4.row`, `s4.joined`."""
    if not hasattr(access, "slot"):
        return "m*b"
    how = type(access).__name__.removeprefix("Read").removeprefix("Write").lower()
    return f"s{access.slot}" + (f".{how}" if how else "")


def _result_text(result: Any) -> str:
    if hasattr(result, "slot"):
        return f"s{result.slot}"
    if hasattr(result, "input"):
        return f"input {result.input}, unchanged"
    return f"constant {_cut(str(result.value), 20)}"
