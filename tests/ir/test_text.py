from __future__ import annotations

import re


def test_traced(values):
    text = str(values.traced)
    assert text.startswith("traced 'small_step': 7 inputs, ")
    assert "batch 8, probed at 2x, 3x the batch" in text
    assert re.search(r"f32\[8,4\] +batch\['x'\] +batch dim 0", text)
    assert re.search(r"i32\[\] +state\['n'\] +donated", text)
    assert len(re.findall(r" = tanh f\d+\n", text)) == 2
    assert "result[1]['loss']" in text


def test_step_program(values):
    text = str(values.program)
    assert "4 microbatches of 2 examples" in text.splitlines()[0]
    assert re.search(r"r\d+ f32\[2,4\] batched\(0\) +<- +slice f\d+ batch\['x'\]", text)
    assert re.search(r"sum in float32 +-> +f\d+", text)
    assert re.search(r"joined along batched\(0\) +-> +f\d+", text)
    assert len(re.findall(r"f32\[2,8\] batched\(0\) = tanh r\d+\n", text)) == 2


def test_layered(values):
    text = str(values.layered)
    assert f"{values.layered.num_layers} layers of" in text.splitlines()[0]
    forward = re.findall(r"^ +F (\d+) ", text, re.MULTILINE)
    backward = re.findall(r"^ +B (\d+) ", text, re.MULTILINE)
    assert len(forward) + len(backward) == len(values.layered.program.region.eqns)
    assert {int(n) for n in forward} == set(range(values.layered.num_layers))
    assert backward


def test_layered_shows_the_layers_of_a_scan(scanned):
    assert re.search(r"F 0-3 .* = scan\{length=4\}", str(scanned))
    assert re.search(r"B 0-3 .* = scan\{length=4, reverse=True\}", str(scanned))


def test_staged(values):
    staged = values.staged
    text = str(staged)
    assert text.startswith("staged 'small_step': 2 stages, 4 microbatches, ")
    for slot in staged.slots:
        assert re.search(rf"^ +s{slot.index} ", text, re.MULTILINE)
    assert text.count("(phase ") == len(staged.fragments)
    assert len(re.findall(r"s\d+ stage \d -> s\d+ stage \d", text)) == len(staged.transfers)
    assert re.search(r"in .*s\d+\.row", text)
    assert re.search(r"out .*s\d+\.accumulate", text)
    assert "batch['x'] " in text


def test_printing_twice_gives_the_same_text(values):
    for value in (values.traced, values.program, values.layered, values.staged):
        assert str(value) == str(value)
        assert "object at 0x" not in str(value)
        assert "Var(" not in str(value)
