"""Operation graphs of common layers, made by hand: forward, and backward by the chain rule.

`Tape` writes down products (in the notation of einsum), elementwise operations and lookups, and
adds the backward operations that differentiation would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from hetpass.ir.operation_graph import Operation, OperationGraph, Parameter, ShardingRule, Value


@dataclass
class Tape:
    """Collects values and operations; `item_bytes` and `dtype` are those of all of them."""

    item_bytes: float = 2.0
    dtype: str = "float16"
    values: list[Value] = field(default_factory=list)
    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)
    pulls: list[Callable[[dict[int, int]], None]] = field(default_factory=list)
    phase: str = "forward"

    def value(self, shape, role="inner", name="", item_bytes=None):
        self.values.append(Value(tuple(shape), item_bytes or self.item_bytes, role, name))
        return len(self.values) - 1

    def add(self, name, operands, result_shape, rule, **more):
        result = self.value(result_shape, item_bytes=more.pop("item_bytes", None))
        operation = Operation(
            name, self.phase, tuple(operands), (result,), rule, dtype=self.dtype, **more
        )
        (self.forward if self.phase == "forward" else self.backward).append(operation)
        return result

    def shape(self, v):
        return self.values[v].shape

    # -- operations -----------------------------------------------------------------------------

    def product(self, spec, a, b, sizes=None):
        """An einsum of two operands; `sizes` of letters, of which parentheses make dimensions."""
        result = self._product(spec, a, b, sizes)
        ins, out = spec.split("->")
        left, right = ins.split(",")

        def pull(grads):
            g = grads[result]
            if self.values[a].role != "example":
                self.give(grads, a, self._product(f"{out},{right}->{left}", g, b, sizes))
            if self.values[b].role != "example":
                self.give(grads, b, self._product(f"{left},{out}->{right}", a, g, sizes))

        self.pulls.append(pull)
        return result

    def _product(self, spec, a, b, sizes=None):
        ins, out = spec.split("->")
        left, right = (_dims(x) for x in ins.split(","))
        found = dict(sizes or {})
        for dims, v in ((left, a), (right, b)):
            for dim, size in zip(dims, self.shape(v), strict=True):
                if len(dim) == 1:
                    found[dim] = size
        letters = sorted({x for dim in (*left, *right) for x in dim})
        number = {x: k for k, x in enumerate(letters)}
        result = _dims(out)
        kept = {x for dim in result for x in dim}

        def as_factors(dims):
            return tuple(tuple(number[x] for x in dim) for dim in dims)

        rule = ShardingRule(
            tuple(found[x] for x in letters),
            (as_factors(left), as_factors(right)),
            (as_factors(result),),
            frozenset(number[x] for x in letters if x not in kept),
        )
        shape = [prod(found[x] for x in dim) for dim in result]
        traffic = sum(self.values[v].size_bytes for v in (a, b)) + prod(shape) * self.item_bytes
        flops = 2.0 * prod(found[x] for x in letters)
        return self.add(
            "dot_general", (a, b), shape, rule, flops=flops, traffic_bytes=traffic, sums=True
        )

    def elementwise(self, name, *operands, linear=False, traffic=False):
        """Dimension by dimension; operands may lack leading dimensions (broadcast)."""
        result = self._elementwise(name, operands, linear, traffic)

        def pull(grads):
            g = grads[result]
            for v in operands:
                if linear:
                    grad = g
                else:
                    grad = self._elementwise(f"{name}_grad", (g, *operands), False, traffic)
                self.give(grads, v, self.summed_like(grad, v))

        self.pulls.append(pull)
        return result

    def _elementwise(self, name, operands, linear, traffic=False):
        shape = max((self.shape(v) for v in operands), key=len)
        rank = len(shape)
        dims = tuple(tuple((k,) for k in range(rank - len(self.shape(v)), rank)) for v in operands)
        rule = ShardingRule(shape, dims, (tuple((k,) for k in range(rank)),))
        moved = sum(self.values[v].size_bytes for v in operands) + prod(shape) * self.item_bytes
        linear = linear and all(self.shape(v) == shape for v in operands)
        return self.add(
            name, operands, shape, rule, linear=linear, traffic_bytes=moved if traffic else 0.0
        )

    def summed_like(self, v, target):
        """Sums leading dimensions away until it has the shape of `target`."""
        extra = len(self.shape(v)) - len(self.shape(target))
        return v if not extra else self.reduce_sum(v, range(extra))

    def reduce_sum(self, v, dims):
        dims, shape = set(dims), self.shape(v)
        rest = tuple((k,) for k in range(len(shape)) if k not in dims)
        rule = ShardingRule(
            shape, (tuple((k,) for k in range(len(shape))),), (rest,), frozenset(dims)
        )
        kept = [n for k, n in enumerate(shape) if k not in dims]
        return self.add("reduce_sum", (v,), kept, rule, linear=True, sums=True)

    def along(self, name, v, dim):
        """Like softmax or a norm: every element depends on all others along `dim`."""
        result = self._along(name, (v,), dim)

        def pull(grads):
            self.give(grads, v, self._along(f"{name}_grad", (grads[result], v), dim))

        self.pulls.append(pull)
        return result

    def _along(self, name, operands, dim):
        shape = self.shape(operands[0])
        dims = tuple((k,) for k in range(len(shape)))
        rule = ShardingRule(
            shape, (dims,) * len(operands), (dims,), whole=frozenset({dim % len(shape)})
        )
        moved = (len(operands) + 1) * self.values[operands[0]].size_bytes
        return self.add(name, operands, shape, rule, traffic_bytes=moved)

    def reshape(self, v, groups, shape):
        """`groups`: the factors of each dimension before and after, as in "bt(hd)", "bthd"."""
        source, target = groups
        result = self._reshape(v, source, target, shape)

        def pull(grads):
            self.give(grads, v, self._reshape(grads[result], target, source, self.shape(v)))

        self.pulls.append(pull)
        return result

    def _reshape(self, v, source, target, shape):
        sizes = {}
        for dims, sizes_of in ((source, self.shape(v)), (target, shape)):
            for dim, size in zip(_dims(dims), sizes_of, strict=True):
                if len(dim) == 1:
                    sizes[dim] = size
        letters = sorted(sizes)
        number = {x: k for k, x in enumerate(letters)}
        rule = ShardingRule(
            tuple(sizes[x] for x in letters),
            (tuple(tuple(number[x] for x in dim) for dim in _dims(source)),),
            (tuple(tuple(number[x] for x in dim) for dim in _dims(target)),),
        )
        return self.add("reshape", (v,), shape, rule, linear=True)

    def lookup(self, table, ids):
        """Rows of a table [V, H] for ids [B, T]: a gather, whose gradient is a scatter-add."""
        (vocabulary, width), (batch, length) = self.shape(table), self.shape(ids)
        sizes = (batch, length, vocabulary, width)
        rule = ShardingRule(
            sizes, (((2,), (3,)), ((0,), (1,))), (((0,), (1,), (3,)),), frozenset({2})
        )
        moved = 2 * batch * length * width * self.item_bytes
        result = self.add(
            "gather", (table, ids), (batch, length, width), rule, sums=True, traffic_bytes=moved
        )

        def pull(grads):
            back = ShardingRule(
                sizes, (((0,), (1,), (3,)), ((0,), (1,))), (((2,), (3,)),), frozenset({0, 1})
            )
            operands = (grads[result], ids)
            self.give(
                grads,
                table,
                self.add(
                    "scatter-add",
                    operands,
                    (vocabulary, width),
                    back,
                    sums=True,
                    traffic_bytes=moved + vocabulary * width * self.item_bytes,
                ),
            )

        self.pulls.append(pull)
        return result

    # -- backward -------------------------------------------------------------------------------

    def give(self, grads, v, gradient):
        if self.values[v].role in ("example", "whole"):
            return
        if v in grads:
            gradient = self._elementwise("add_any", (grads[v], gradient), True)
        grads[v] = gradient

    def graph(self, outputs, inputs, state_bytes_per_item=12.0, accumulator_item_bytes=4.0):
        """Differentiates; `outputs` go to the next layer, `inputs` came from the one before."""
        self.phase = "backward"
        grads = {v: self.value(self.shape(v), "cotangent") for v in outputs}
        for pull in reversed(self.pulls):
            pull(grads)
        parameters = tuple(
            Parameter(
                v,
                grads.get(v),
                prod(value.shape) * state_bytes_per_item,
                prod(value.shape) * accumulator_item_bytes,
            )
            for v, value in enumerate(list(self.values))
            if value.role == "parameter"
        )
        return OperationGraph(
            tuple(self.values),
            (*self.forward, *self.backward),
            parameters,
            activations_out=tuple(outputs),
            cotangents_out=tuple(grads[v] for v in inputs),
            accumulated=tuple(p.gradient for p in parameters if p.gradient is not None),
        )


def _dims(text):
    """ "bt(hd)" -> ["b", "t", "hd"]."""
    found, inside = [], None
    for letter in text.replace(" ", ""):
        if letter == "(":
            inside = ""
        elif letter == ")":
            found.append(inside)
            inside = None
        elif inside is not None:
            inside += letter
        else:
            found.append(letter)
    return found


def mlp(batch, width, layers, hidden=None, *, first=False):
    """`layers` products with a nonlinearity after each, from width to width over hidden.

    The first layers of a model read examples, whose gradient nobody wants.
    """
    tape = Tape()
    x = start = tape.value((batch, width), "example" if first else "activation")
    wide = hidden or width
    for k in range(layers):
        shape = (width, wide) if k % 2 == 0 else (wide, width)
        w = tape.value(shape, "parameter", f"w{k}")
        x = tape.elementwise("tanh", tape.product("bi,ij->bj", x, w))
    return tape.graph([x], [] if first else [start])


def tied_embedding(batch, length, vocabulary, width):
    """A table that is read twice: rows by ids, and all of it for the logits."""
    tape = Tape()
    ids = tape.value((batch, length), "example", item_bytes=4)
    table = tape.value((vocabulary, width), "parameter", "table")
    x = tape.elementwise("tanh", tape.lookup(table, ids))
    logits = tape.elementwise("exp", tape.product("bth,vh->btv", x, table), traffic=True)
    return tape.graph([logits], [])


def moe(groups, tokens, experts, capacity, width, hidden):
    """GShard's mixture of experts: tokens are dispatched to experts and combined again.

    Lepikhin et al. 2021, section 3: G groups of S tokens, E experts, C tokens for each.
    """
    tape = Tape()
    x = start = tape.value((groups, tokens, width), "activation")
    dispatch = tape.value((groups, tokens, experts, capacity), "example")
    combine = tape.value((groups, tokens, experts, capacity), "example")
    up = tape.value((experts, width, hidden), "parameter", "up")
    down = tape.value((experts, hidden, width), "parameter", "down")
    y = tape.product("gsec,gsm->egcm", dispatch, x)
    y = tape.elementwise("relu", tape.product("egcm,emh->egch", y, up))
    y = tape.product("egch,ehm->egcm", y, down)
    x = tape.product("gsec,egcm->gsm", combine, y)
    return tape.graph([x], [start])


def transformer_block(batch, length, width, heads, *, fused=True, mlp_ratio=4):
    """Attention and MLP with norms and residual connections, as in GPT."""
    tape = Tape()
    size = width // heads
    x = start = tape.value((batch, length, width), "activation")

    def norm(v, name):
        scale = tape.value((width,), "parameter", f"{name}.scale")
        bias = tape.value((width,), "parameter", f"{name}.bias")
        scaled = tape.elementwise("mul", tape.along("norm", v, -1), scale)
        return tape.elementwise("add", scaled, bias, linear=True)

    y = norm(x, "norm1")
    if fused:
        w = tape.value((width, heads, 3 * size), "parameter", "qkv")
        qkv = tape.product("bti,ihd->bthd", y, w)
        q, k, v = (_slice_last(tape, qkv, size) for _ in range(3))
    else:
        q, k, v = (
            tape.product("bti,ihd->bthd", y, tape.value((width, heads, size), "parameter", name))
            for name in ("q", "k", "v")
        )
    scores = tape.product("bthd,bshd->bhts", q, k)
    weights = tape.along("softmax", scores, -1)
    mixed = tape.product("bhts,bshd->bthd", weights, v)
    out = tape.value((heads, size, width), "parameter", "out")
    x = tape.elementwise("add", x, tape.product("bthd,hdi->bti", mixed, out), linear=True)
    y = norm(x, "norm2")
    up = tape.value((width, mlp_ratio * width), "parameter", "up")
    down = tape.value((mlp_ratio * width, width), "parameter", "down")
    y = tape.product("bti,ij->btj", y, up)
    bias = tape.value((mlp_ratio * width,), "parameter", "up.bias")
    y = tape.elementwise("gelu", tape.elementwise("add", y, bias, linear=True), traffic=True)
    x = tape.elementwise("add", x, tape.product("btj,ji->bti", y, down), linear=True)
    return tape.graph([x], [start])


def _slice_last(tape, v, size):
    """One part of the last dimension, which stays whole; backward pads it with zeros."""
    shape = tape.shape(v)
    result = _last(tape, "slice", v, (*shape[:-1], size))

    def pull(grads):
        tape.give(grads, v, _last(tape, "pad", grads[result], shape))

    tape.pulls.append(pull)
    return result


def _last(tape, name, v, shape):
    rank = len(shape)
    dims = tuple((k,) for k in range(rank))
    sizes = tuple(max(a, b) for a, b in zip(shape, tape.shape(v), strict=True))
    rule = ShardingRule(sizes, (dims,), (dims,), whole=frozenset({rank - 1}))
    return tape.add(name, (v,), shape, rule, linear=True)


def random_layer(rng, item_bytes, batch=8, width=6):
    """A few products and nonlinearities, perhaps around a residual connection."""
    tape = Tape(item_bytes=item_bytes)
    x = start = tape.value((batch, width), "activation")
    for k in range(rng.randint(1, 2)):
        hidden = rng.choice((4, 12, 7))
        w = tape.value((width, hidden), "parameter", f"w{k}")
        y = tape.product("bi,ij->bj", x, w)
        if rng.random() < 0.5:
            y = tape.elementwise("tanh", y)
        y = tape.product("bi,ij->bj", y, tape.value((hidden, width), "parameter", f"v{k}"))
        x = tape.elementwise("add", x, y, linear=True) if rng.random() < 0.5 else y
    if rng.random() < 0.3:
        x = tape.along("norm", x, -1)
    return tape.graph([x], [start])


def stacked(graphs):
    """One graph of several layers: what one gives, the next reads."""
    values, forward, backward, parameters, accumulated = [], [], [], [], []
    numbers = []
    for layer, graph in enumerate(graphs):
        own = {}
        if layer:
            inputs = [v for v, value in enumerate(graph.values) if value.role == "activation"]
            given = [numbers[-1][v] for v in graphs[layer - 1].activations_out]
            own = dict(zip(inputs, given, strict=True))
        for v, value in enumerate(graph.values):
            if v not in own:
                own[v] = len(values)
                values.append(value)
        numbers.append(own)
    # The cotangent that a layer reads is what the next one gives.
    alias = {}
    for layer, graph in enumerate(graphs[:-1]):
        wanted = [v for v, value in enumerate(graph.values) if value.role == "cotangent"]
        for v, given in zip(wanted, graphs[layer + 1].cotangents_out, strict=True):
            alias[numbers[layer][v]] = numbers[layer + 1][given]
    for layer in reversed(range(len(graphs))):
        numbers[layer] = {v: alias.get(n, n) for v, n in numbers[layer].items()}

    def moved(operation, own):
        return replace(
            operation,
            operands=tuple(own[v] for v in operation.operands),
            results=tuple(own[v] for v in operation.results),
        )

    for graph, own in zip(graphs, numbers, strict=True):
        forward += [moved(o, own) for o in graph.operations if o.phase == "forward"]
        parameters += [
            replace(p, value=own[p.value], gradient=None if p.gradient is None else own[p.gradient])
            for p in graph.parameters
        ]
        accumulated += [own[v] for v in graph.accumulated]
    for graph, own in reversed(list(zip(graphs, numbers, strict=True))):
        backward += [moved(o, own) for o in graph.operations if o.phase == "backward"]
    return _compact(values, forward + backward, parameters, accumulated, graphs, numbers)


def _compact(values, operations, parameters, accumulated, graphs, numbers):
    """Drops values that nothing names any more."""
    used = {v for o in operations for v in (*o.operands, *o.results)}
    used |= {p.value for p in parameters}
    keep = sorted(used)
    place = {v: k for k, v in enumerate(keep)}
    return OperationGraph(
        tuple(values[v] for v in keep),
        tuple(
            replace(
                o,
                operands=tuple(place[v] for v in o.operands),
                results=tuple(place[v] for v in o.results),
            )
            for o in operations
        ),
        tuple(
            replace(
                p,
                value=place[p.value],
                gradient=None if p.gradient is None else place[p.gradient],
            )
            for p in parameters
        ),
        activations_out=tuple(place[numbers[-1][v]] for v in graphs[-1].activations_out),
        cotangents_out=tuple(place[numbers[0][v]] for v in graphs[0].cotangents_out),
        accumulated=tuple(place[v] for v in accumulated),
    )
