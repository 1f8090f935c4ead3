from __future__ import annotations

import pytest

from hetpass.errors import FactsError
from hetpass.ir.facts import Amount, LayerFacts, ProgramFacts, Seconds


def test_amounts_scale_with_the_examples():
    assert Amount(2.0, 0.5).of(8) == 6.0
    assert Amount().of(8) == 0.0


def test_short_records_mean_per_example():
    facts = ProgramFacts.synthetic(
        2 * [{"seconds": {"fast": (0.2, 0.3)}, "boundary_bytes": 4, "parameter_bytes": 7}]
        + [{"kind": "head", "forward_flops": {"float16": 2e12}}],
        8,
    )
    assert facts.num_layers == 3
    assert facts.layers[0].seconds["fast"] == Seconds(Amount(0, 0.2), Amount(0, 0.3))
    assert facts.layers[0].boundary_bytes == Amount(0, 4)
    assert facts.layers[2].dtypes == {"float16"}
    assert "2 x layer" in str(facts)


def test_reads_back_equal(tmp_path):
    layer = LayerFacts(
        "attention",
        forward_flops={"float16": Amount(1.0, 2.0)},
        activation_bytes=Amount(0.0, 5.0),
        most_tensor_parallel=8,
        seconds={"a": Seconds(Amount(1.0), Amount(0.0, 2.0))},
    )
    facts = ProgramFacts((layer, LayerFacts("head")), 16, "abc")
    again = ProgramFacts.from_json(facts.to_json())
    assert again == facts
    assert again.layers[0].seconds == layer.seconds
    assert again.layers[0].forward_flops == layer.forward_flops
    assert again.to_json() == facts.to_json()
    facts.save(tmp_path / "facts.json")
    assert ProgramFacts.load(tmp_path / "facts.json") == facts


@pytest.mark.parametrize(
    ("record", "code", "where"),
    [
        ({"boundary_bytes": -1}, "HP-FACTS-VALUE", "layers[0].per_example"),
        ({"boundary": 1}, "HP-FACTS-KEY", "layers[0]"),
        ({"forward_flops": {"half": 1}}, "HP-FACTS-DTYPE", "layers[0].forward_flops.half"),
        ({"parameter_bytes": float("nan")}, "HP-FACTS-VALUE", "layers[0].parameter_bytes"),
        ({"most_tensor_parallel": 0}, "HP-FACTS-VALUE", "layers[0].most_tensor_parallel"),
    ],
)
def test_nonsense_is_refused(record, code, where):
    with pytest.raises(FactsError) as caught:
        ProgramFacts.synthetic([record], 8)
    assert (caught.value.code, caught.value.where) == (code, where)


def test_files_are_refused_by_name():
    text = ProgramFacts.synthetic([{}], 8).to_json()
    for old, new, code in [
        ("hetpass-facts/1", "other", "HP-FACTS-FORMAT"),
        ('"batch_size": 8', '"batch_size": 0', "HP-FACTS-VALUE"),
        ('"kind": "layer"', '"kinds": 3', "HP-FACTS-KEY"),
    ]:
        with pytest.raises(FactsError) as caught:
            ProgramFacts.from_json(text.replace(old, new))
        assert caught.value.code == code
    with pytest.raises(FactsError):
        ProgramFacts.synthetic([], 8)
