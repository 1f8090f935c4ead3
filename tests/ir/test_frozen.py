"""Values can be copied and pickled; what is in them cannot be changed."""

from __future__ import annotations

import copy
import pickle

import pytest

from hetpass.ir.catalogue import find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, Link
from hetpass.ir.frozen import Frozen
from hetpass.ir.plan import Plan

LINK = Link(1e-4, 1e9)
CLUSTER = Cluster(
    tuple(DeviceGroup(name, find_kind("A100-40"), 1, 4, None, LINK) for name in ("a", "b")),
    default_link=LINK,
)
PLAN = Plan.parse("a: 0-3 | b: 4-7", cluster=CLUSTER, num_layers=8, num_microbatches=4)


@pytest.mark.parametrize("value", [CLUSTER, PLAN, Frozen({"a": 1})], ids=lambda v: type(v).__name__)
def test_copies_are_equal(value):
    assert copy.copy(value) == value
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__("a", 2),
        lambda m: m.__delitem__("a"),
        lambda m: m.update(a=2),
        lambda m: m.setdefault("b", 2),
        lambda m: m.pop("a"),
        lambda m: m.popitem(),
        lambda m: m.clear(),
        lambda m: m.__ior__({"a": 2}),
    ],
)
def test_nothing_changes_it(change):
    mapping = Frozen({"a": 1})
    for frozen in (mapping, pickle.loads(pickle.dumps(mapping))):
        with pytest.raises(TypeError, match="cannot be changed"):
            change(frozen)
        assert frozen == {"a": 1}
