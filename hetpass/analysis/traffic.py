"""Bytes to and from memory that remain after fusion, per operation of a layer.

A compiler computes chains of elementwise equations in one pass: what lies between two of them is
never in memory. Here a value is in memory if it comes from outside or leaves, if a product, lookup
or reduction makes it, or if something that cannot be fused reads it. Equations that hand values on
to each other without memory make a group, and a group reads each value once. Reshapes and the like
are other names of the same memory.
"""

from __future__ import annotations

from hetpass.analysis.flops import ELEMENTWISE, aval_bytes
from hetpass.analysis.layer_operations import LayerOperations, OperationDraft

_NAMES = frozenset(
    "reshape squeeze expand_dims copy copy_p stop_gradient optimization_barrier transpose "
    "bitcast_convert_type".split()
)
_FUSED = ELEMENTWISE | frozenset(
    "broadcast_in_dim convert_element_type iota select_n pad slice rev concatenate "
    "reduce_precision random_bits".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod argmax argmin".split())
_READ_ROWS = frozenset("gather dynamic_slice".split())


def traffic_bytes(found: LayerOperations, leaving: frozenset[int]) -> tuple[float, ...]:
    """One figure per operation, of all its results and operands whole.

    Args:
      leaving: values that the layer hands on or accumulates.
    """
    fusion = _Fusion(found, leaving)
    read: set[tuple[int, int]] = set()
    traffic = []
    for number, draft in enumerate(found.drafts):
        total = 0.0
        if draft.kind == "equation" and draft.eqn.primitive.name not in _NAMES:
            written = [r for r in draft.results if fusion.in_memory(r)]
            total = sum(fusion.size(r) for r in written)
            total += fusion.read_bytes(number, draft, read)
        traffic.append(total)
    return tuple(traffic)


class _Fusion:
    """Which values are in memory, and which operations run together; local to `traffic_bytes`."""

    def __init__(self, found: LayerOperations, leaving: frozenset[int]) -> None:
        self.found = found
        self.root = list(range(len(found.variables)))  # the value that owns the memory
        self.group = list(range(len(found.drafts)))
        self.memory = [role != "inner" for role in found.roles]
        maker: dict[int, int] = {}
        for number, draft in enumerate(found.drafts):
            maker.update(dict.fromkeys(draft.results, number))
            if self._is_name(draft) and draft.operands:
                for result in draft.results:
                    self.root[result] = self.root[draft.operands[0]]
            elif not self._is_fused(draft) or draft.kind != "equation":
                for result in draft.results:
                    self.memory[result] = True
        for value in leaving:
            self.memory[self.root[value]] = True
        for draft in found.drafts:
            for operand in draft.operands:
                made = maker.get(self.root[operand])
                other = made is not None and found.drafts[made].phase != draft.phase
                if other or not (self._joins(draft) or self._is_name(draft)):
                    self.memory[self.root[operand]] = True
        for number, draft in enumerate(found.drafts):
            for operand in draft.operands if self._joins(draft) else ():
                made = maker.get(self.root[operand])
                if made is not None and not self.memory[self.root[operand]]:
                    self._unite(number, made)

    def _is_name(self, draft: OperationDraft) -> bool:
        return draft.kind != "equation" or draft.eqn.primitive.name in _NAMES

    def _is_fused(self, draft: OperationDraft) -> bool:
        return draft.eqn.primitive.name in _FUSED

    def _joins(self, draft: OperationDraft) -> bool:
        """Reductions end a group: they read what is not in memory, and write their result."""
        name = draft.eqn.primitive.name
        return draft.kind == "equation" and (name in _FUSED or name in _REDUCTIONS)

    def _find(self, number: int) -> int:
        while self.group[number] != number:
            number = self.group[number]
        return number

    def _unite(self, left: int, right: int) -> None:
        a, b = sorted((self._find(left), self._find(right)))
        self.group[b] = a

    def in_memory(self, value: int) -> bool:
        return self.memory[self.root[value]] and self.root[value] == value

    def size(self, value: int) -> float:
        return aval_bytes(self.found.variables[value].aval)

    def read_bytes(self, number: int, draft: OperationDraft, read: set[tuple[int, int]]) -> float:
        """What the operation reads that its group has not read before."""
        group, total = self._find(number), 0.0
        for place, operand in enumerate(draft.operands):
            root = self.root[operand]
            if self.memory[root] and (group, root) not in read:
                read.add((group, root))
                total += self.size(root)
                if draft.eqn.primitive.name in _READ_ROWS and place == 0:
                    total += self.size(draft.results[0]) - self.size(root)
        return total
