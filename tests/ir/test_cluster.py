from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpass.errors import ClusterError
from hetpass.ir.catalogue import catalogue, find_kind
from hetpass.ir.cluster import Cluster, DeviceGroup, DeviceKind, Link
from hetpass.ir.devices import CAPABILITIES, DTYPES

FILE = """
[[groups]]
name = "fast"
kind = "A100-40"
devices_per_host = 4

[[groups]]
name = "slow"
kind = "mine"
hosts = 2
devices_per_host = 4
intra_host = { latency = "10 us", bandwidth = "25 GB/s" }
inter_host = { latency = "20 us", bandwidth = "100 Gbps" }

[kinds.mine]
peak_flops = { float32 = "15.7 TFLOP/s", float16 = 125e12 }
memory = "16 GiB"
memory_bandwidth = "900 GB/s"

[[links]]
between = ["slow", "fast"]
latency = "200 us"
bandwidth = "5 Gbps"
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text, name="c.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return Cluster.from_file(path)

    return read_text


def test_a_file_is_read_with_units(read):
    cluster = read(FILE)
    assert cluster.num_devices == 12
    assert cluster.link("fast", "slow") == Link(2e-4, 0.625e9) == cluster.link("slow", "fast")
    assert cluster.group("fast").intra_host == Link(5e-6, 300e9)
    slow = cluster.group("slow")
    assert slow.kind.peak_flops == {"float32": 15.7e12, "float16": 125e12}
    assert slow.kind.memory_bytes == 16 * 2**30
    assert slow.link_among(4) == Link(1e-5, 25e9)
    assert slow.link_among(5) == Link(2e-5, 12.5e9) == cluster.link("slow", "slow")
    assert "fast - slow: 625 MB/s, 200 us" in str(cluster)


BAD = {
    # name: (old text, new text, word of the code, end of the path)
    "unknown key": ("hosts = 2", "host = 2", "KEY", "groups[1].host"),
    "unknown key at the top": ("[[links]]", "[[link]]", "KEY", "link"),
    "duplicate group": ('name = "slow"', 'name = "fast"', "DUPLICATE", "groups[1].name"),
    "negative bandwidth": ('"25 GB/s"', "-25e9", "VALUE", "groups[1].intra_host.bandwidth"),
    "zero bandwidth": ('"25 GB/s"', "0", "VALUE", "groups[1].intra_host.bandwidth"),
    "NaN bandwidth": ('"25 GB/s"', "nan", "VALUE", "groups[1].intra_host.bandwidth"),
    "infinite bandwidth": ('"25 GB/s"', "inf", "VALUE", "groups[1].intra_host.bandwidth"),
    "negative latency": ('"10 us"', '"-10 us"', "VALUE", "groups[1].intra_host.latency"),
    "unknown unit": ('"10 us"', '"10 parsecs"', "UNIT", "groups[1].intra_host.latency"),
    "bits for bytes": ('"16 GiB"', '"16 Gib"', "UNIT", "kinds.mine.memory"),
    "no unit in a text": ('"16 GiB"', '"16"', "UNIT", "kinds.mine.memory"),
    "zero devices": ("hosts = 2", "hosts = 0", "VALUE", "groups[1].hosts"),
    "half a host": ("hosts = 2", "hosts = 1.5", "TYPE", "groups[1].hosts"),
    "a bool for a count": ("hosts = 2", "hosts = true", "TYPE", "groups[1].hosts"),
    "too many devices": ("hosts = 2", "hosts = 999999", "VALUE", "groups[1].devices_per_host"),
    "unknown kind": ('"A100-40"', '"A100-41"', "KIND", "groups[0].kind"),
    "kind is no text": ('"A100-40"', "100", "TYPE", "groups[0].kind"),
    "missing link": (FILE[FILE.index("[[links]]") :], "", "LINK", "links"),
    "link to nobody": ('["slow", "fast"]', '["slow", "fats"]', "GROUP", "links[0].between"),
    "link to itself": ('["slow", "fast"]', '["slow", "slow"]', "VALUE", "links[0].between"),
    "link of three": ('["slow", "fast"]', '["slow", "fast", "x"]', "VALUE", "links[0].between"),
    "missing inter_host": (
        'inter_host = { latency = "20 us", bandwidth = "100 Gbps" }',
        "",
        "LINK",
        "groups[1].inter_host",
    ),
    "missing intra_host": (
        'intra_host = { latency = "10 us", bandwidth = "25 GB/s" }',
        "",
        "LINK",
        "groups[1].intra_host",
    ),
    "missing name": ('name = "slow"', "", "MISSING", "groups[1].name"),
    "missing latency": ('latency = "20 us", ', "", "MISSING", "groups[1].inter_host.latency"),
    "markup in a name": ('name = "slow"', 'name = "<b>slow"', "NAME", "groups[1].name"),
    "newline in a kind": ("[kinds.mine]", '[kinds."mi\\nne"]', "NAME", "name"),
    "empty name": ('name = "slow"', 'name = ""', "NAME", "groups[1].name"),
    "unknown dtype": ("float16 =", "fp16 =", "DTYPE", "kinds.mine.peak_flops.fp16"),
    "no rate": (
        '{ float32 = "15.7 TFLOP/s", float16 = 125e12 }',
        "{}",
        "VALUE",
        "kinds.mine.peak_flops",
    ),
    "groups is no list": ("[[groups]]", "[groups]", "SYNTAX", "c.toml:"),
    "not TOML": ("[[groups]]", "[[groups", "SYNTAX", "c.toml:"),
    "a YAML tag": ("[[groups]]", "!!python/object:os.system", "SYNTAX", "c.toml:"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_by_place(read, case):
    old, new, word, place = BAD[case]
    assert old in FILE
    with pytest.raises(ClusterError) as error:
        read(FILE.replace(old, new))
    assert error.value.code == f"HP-CLUSTER-{word}"
    assert error.value.where.endswith(place), error.value.where
    assert "c.toml" in error.value.where


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"groups": []},
        {"groups": {}},
        {"groups": [1]},
        {"groups": [{}]},
        {"groups": [{"name": "a", "kind": "cpu", "devices_per_host": 1}], "links": {}},
        {"groups": [{"name": "a", "kind": "cpu", "devices_per_host": 1}], "kinds": []},
        {"groups": [{"name": "a", "kind": "cpu", "devices_per_host": 1}], "kinds": {"k": 1}},
        {"groups": [{"name": "a", "kind": "cpu", "devices_per_host": 1}], "default_link": 1},
        {"groups": [{"name": ["a"], "kind": "cpu", "devices_per_host": 1}]},
        {"groups": [{"name": "a", "kind": "cpu", "devices_per_host": 10**30}]},
        {1: 2},
    ],
)
def test_bad_data(data):
    with pytest.raises(ClusterError):
        Cluster.from_dict(data)


def test_a_link_given_twice_is_refused(read):
    twice = FILE + '\n[[links]]\nbetween = ["fast", "slow"]\nlatency = 1\nbandwidth = 1\n'
    with pytest.raises(ClusterError, match="twice"):
        read(twice)


def test_an_unknown_kind_names_the_nearest(read):
    with pytest.raises(ClusterError, match="did you mean 'A100-40'"):
        read(FILE.replace('"A100-40"', '"A10040"'))


def test_records_made_by_hand_are_checked_too():
    cpu = find_kind("cpu")
    one = DeviceGroup("one", cpu, 1, 1)
    with pytest.raises(ClusterError) as error:
        Link(1e-6, float("nan"))
    assert error.value.where == "bandwidth"
    with pytest.raises(ClusterError):
        Link("fast", 1.0)
    with pytest.raises(ClusterError):
        DeviceGroup("one", "cpu", 1, 1)
    with pytest.raises(ClusterError):
        DeviceKind("k", {"float32": 1.0}, 1, 1.0, frozenset({"fly"}))
    with pytest.raises(ClusterError):
        Cluster((one, one))
    with pytest.raises(ClusterError):
        Cluster((one,), {("one", "two"): Link(0, 1)})
    with pytest.raises(ClusterError):
        Cluster((one,), {"one": Link(0, 1)})
    with pytest.raises(ClusterError):
        Cluster((one, DeviceGroup("two", cpu, 1, 1)), {("one", "two"): 5})
    with pytest.raises(ClusterError):
        Cluster(("one",))
    with pytest.raises(ClusterError):
        Cluster((one,)).group("on")
    other = DeviceKind("cpu", {"float32": 1.0}, 1, 1.0)
    with pytest.raises(ClusterError, match="two different device kinds"):
        Cluster((one, DeviceGroup("two", other, 1, 1)), default_link=Link(0, 1))


def test_a_cluster_does_not_change():
    cluster = Cluster.emulated({"a": 1, "b": 1})
    with pytest.raises(TypeError):
        cluster.links["a", "b"] = Link(0, 1)
    assert hash(cluster) == hash(Cluster.emulated({"a": 1, "b": 1}))


positive = st.floats(min_value=1e-300, max_value=1e300)
links = st.builds(Link, st.floats(min_value=0, max_value=1e6), positive)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)


@st.composite
def clusters(draw):
    texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
    kind_names = st.text(st.characters(codec="utf-8", categories=("L", "N", "S")), min_size=1)
    kinds = draw(
        st.lists(
            st.builds(
                DeviceKind,
                name=kind_names.filter(lambda n: n.isprintable() and len(n) < 50),
                peak_flops=st.dictionaries(st.sampled_from(DTYPES), positive, min_size=1),
                memory_bytes=st.integers(1, 2**50),
                memory_bandwidth=positive,
                capabilities=st.frozensets(st.sampled_from(CAPABILITIES)),
                link=st.none() | links,
                source=texts,
            ),
            min_size=1,
            max_size=2,
            unique_by=lambda kind: kind.name,
        )
    )
    groups = [
        DeviceGroup(
            name,
            draw(st.sampled_from(kinds)),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 8)),
            draw(links),
            draw(links),
        )
        for name in draw(st.lists(names, min_size=1, max_size=4, unique=True))
    ]
    pairs = [(a.name, b.name) for a in groups for b in groups if a.name < b.name]
    some = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return Cluster(tuple(groups), {pair: draw(links) for pair in some}, draw(links))


@given(cluster=clusters(), suffix=st.sampled_from([".toml", ".json"]))
def test_files_give_the_cluster_back_exactly(tmp_path_factory, cluster, suffix):
    path = tmp_path_factory.mktemp("clusters") / f"c{suffix}"
    cluster.to_file(path)
    again = Cluster.from_file(path)
    assert again == cluster
    assert again.to_dict() == cluster.to_dict()
    assert json.loads(json.dumps(cluster.to_dict())) == cluster.to_dict()


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["groups", "name", "kind", "hosts", "devices_per_host", "links", "kinds"]
                )
                | st.text(max_size=4),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_a_file_holds_only_cluster_errors_come_out(data):
    with suppress(ClusterError):
        Cluster.from_dict(data)


def test_to_file_refuses_other_suffixes(tmp_path):
    with pytest.raises(ClusterError, match=r"\.toml or \.json"):
        Cluster.emulated({"a": 1}).to_file(tmp_path / "c.yaml")


# -- devices ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0


def test_emulated_groups_have_relative_speeds():
    cluster = Cluster.emulated({"fast": 4, "slow": 2}, speeds={"fast": 3.0})
    fast, slow = (cluster.group(name).kind for name in ("fast", "slow"))
    assert slow == find_kind("cpu")
    assert fast.peak_flops["float32"] == 3 * slow.peak_flops["float32"]
    assert fast.memory_bytes == slow.memory_bytes
    for bad in ({"fats": 1.0}, {"fast": 0.0}, {"fast": float("nan")}):
        with pytest.raises(ClusterError):
            Cluster.emulated({"fast": 4}, speeds=bad)
    with pytest.raises(ClusterError):
        Cluster.emulated({})
    with pytest.raises(ClusterError):
        Cluster.emulated({"fast": 0})


def test_bind_gives_disjoint_devices_in_order():
    devices = [Device(i) for i in range(8)]
    bound = Cluster.emulated({"fast": 4, "slow": 2}).bind(devices)
    assert [d.id for d in bound["fast"]] == [0, 1, 2, 3]
    assert [d.id for d in bound["slow"]] == [4, 5]


def test_bind_refuses_too_few_devices_with_the_numbers():
    with pytest.raises(ClusterError) as error:
        Cluster.emulated({"fast": 4, "slow": 2}).bind([Device(i) for i in range(5)])
    assert error.value.code == "HP-CLUSTER-DEVICES"
    assert "'slow' needs 2 devices, 1 are left" in error.value.what
    assert "needs 6 devices in all, 5 were given" in str(error.value)
    assert "device_count=6" in str(error.value)
    with pytest.raises(ClusterError):
        Cluster.emulated({"fast": 1}).bind([])


def gpu(index, kind, process=0):
    return Device(index, "gpu", kind, process)


def test_bind_never_mixes_kinds():
    a100, v100 = "NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB"
    devices = [gpu(0, v100), gpu(1, a100), gpu(2, v100), gpu(3, a100)]
    auto = Cluster.auto(devices)
    assert [(g.name, g.num_devices) for g in auto.groups] == [("V100-16", 2), ("A100-40", 2)]
    bound = auto.bind(devices)
    assert [d.id for d in bound["V100-16"]] == [0, 2]
    assert [d.id for d in bound["A100-40"]] == [1, 3]
    with pytest.raises(ClusterError):
        auto.bind([gpu(0, v100), gpu(1, v100), gpu(2, v100), gpu(3, a100)])


def test_auto_on_several_hosts():
    h100 = "NVIDIA H100 80GB HBM3"
    devices = [gpu(0, h100, 0), gpu(1, h100, 1), gpu(2, h100, 1), gpu(3, h100, 2), gpu(4, h100, 2)]
    cluster = Cluster.auto(devices)
    one, two = cluster.groups
    assert (one.name, one.hosts, one.devices_per_host) == ("H100-80", 1, 1)
    assert (two.name, two.hosts, two.devices_per_host) == ("H100-80-2", 2, 2)
    assert two.inter_host == catalogue().network
    bound = cluster.bind(list(reversed(devices)))
    assert {d.id for d in bound["H100-80"]} == {0}
    assert {d.process_index for d in bound["H100-80-2"][:2]} != {1, 2}


def test_auto_refuses_what_it_does_not_know():
    with pytest.raises(ClusterError) as error:
        Cluster.auto([gpu(0, "NVIDIA Z9")])
    assert error.value.code == "HP-CLUSTER-KIND"
    with pytest.raises(ClusterError):
        Cluster.auto([])


def test_auto_on_jax_devices():
    import jax

    cluster = Cluster.auto(jax.devices())
    (group,) = cluster.groups
    assert (group.name, group.num_devices) == ("cpu", len(jax.devices()))
    assert list(cluster.bind(jax.devices())["cpu"]) == jax.devices()


def test_reading_a_cluster_imports_no_jax():
    program = (
        "import sys, hetpass; hetpass.Cluster.emulated({'a': 1}); hetpass.Plan;"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# -- the catalogue ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(catalogue().kinds))
def test_every_kind_has_a_source_and_a_link(name):
    kind = catalogue().kinds[name]
    assert len(kind.source) > 20
    assert kind.link is not None
    assert "float32" in kind.peak_flops
    # Peak rates fall with the width of the format; a slip of a power of ten breaks the order.
    rates = kind.peak_flops
    if name != "cpu":
        assert rates.get("float64", 0) < rates["float32"]
        assert rates["float32"] <= rates.get("tf32", rates["float32"])
        assert 1 <= rates.get("bfloat16", rates.get("float16")) / rates["float32"] < 20
        assert 4e9 < kind.memory_bytes < 2e11
        assert 1e11 < kind.memory_bandwidth < 1e13


def test_kinds_that_a_cluster_of_the_literature_needs():
    wanted = {
        *("V100-16", "V100-32", "A100-40", "A100-80", "H100-80", "H200", "L4", "L40S", "T4"),
        *("RTX-2080", "RTX-3080", "RTX-4080", "RTX-4090", "cpu"),
        *("TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e"),
    }
    assert wanted <= set(catalogue().kinds)
    assert "bfloat16" not in find_kind("V100-16").peak_flops
    assert set(catalogue().jax_names.values()) == set(catalogue().kinds)
