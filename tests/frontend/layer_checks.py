"""An independent checker of `Layered`: what its docstring promises, read off the equations."""

from __future__ import annotations

from hetpass._jax import Literal, Var
from hetpass.ir.program import Layered


def faults(layered: Layered) -> list[str]:
    """What is wrong; [] if nothing is."""
    region = layered.program.region
    found = _shape_faults(layered)
    made = {}
    for number, eqn in enumerate(region.eqns):
        span, late = layered.spans[number], layered.backward[number]
        where = f"{number} {eqn.primitive.name}"
        if not 0 <= span.first <= span.last < layered.num_layers:
            found.append(f"{where}: {span} of {layered.num_layers} layers")
        if span.first < span.last:
            length = eqn.params.get("length")
            if eqn.primitive.name != "scan" or length != span.last - span.first + 1:
                found.append(f"{where}: spans {span}, length {length}")
            elif bool(eqn.params["reverse"]) != late:
                found.append(f"{where}: runs against the layers")
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                continue
            if atom not in made:
                if atom not in region.invars:
                    found.append(f"{where}: reads {atom} before it is made")
                continue
            source = made[atom]
            other, other_late = layered.spans[source], layered.backward[source]
            if other_late and not late:
                found.append(f"{where}: forward, reads backward {source}")
            elif not other_late and not late and other.last > span.first:
                found.append(f"{where}: on {span}, reads {source} on {other}")
            elif other_late and late and other.first < span.last:
                found.append(f"{where}: backward on {span}, reads {source} on {other}")
        for var in eqn.outvars:
            made[var] = number
    results = [v for v in region.outvars if isinstance(v, Var)]
    if len(set(results)) != len(results) or any(v not in made for v in results):
        found.append("results are not distinct results of equations")
    return found


def _shape_faults(layered: Layered) -> list[str]:
    size, count = len(layered.program.region.eqns), layered.num_layers
    program = layered.program
    lengths = {
        "spans": (len(layered.spans), size),
        "backward": (len(layered.backward), size),
        "origin": (len(program.origin), size),
        "layer_kinds": (len(layered.layer_kinds), count),
        "forward_flops": (len(layered.forward_flops), count),
        "backward_flops": (len(layered.backward_flops), count),
        "cut_bytes": (len(layered.cut_bytes), count - 1),
        "names": (len(set(layered.names)), count),
        "outvars": (len(program.region.outvars), len(program.region_outputs)),
        "invars": (len(program.region.invars), len(program.region_inputs)),
    }
    found = [f"{name}: {got} for {want}" for name, (got, want) in lengths.items() if got != want]
    for eqn in program.region.eqns:
        found += [f"{v} has no kind" for v in eqn.outvars if v not in program.kinds]
    if any(not 0 < k < count for k in layered.boundaries):
        found.append(f"boundaries {layered.boundaries}")
    return found
