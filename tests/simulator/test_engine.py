import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.schedules.pipe import numbered, prepare
from hetpass.simulator.engine import play, play_blocking

# Multiples of 1/8 are exact, and primes of them rarely tie.
_seconds = st.integers(1, 97).map(lambda n: n / 8)
_stage = st.builds(StageCost, _seconds, _seconds)
_wires = st.sampled_from([(), (), ("nic",), ("nic", "card")])
_link = st.builds(
    LinkCost,
    _seconds,
    _seconds,
    _seconds,
    st.just(True),
    forward_wires=_wires,
    backward_wires=_wires,
)


@st.composite
def _instances(draw):
    stages = draw(st.integers(1, 4))
    costs = PipelineCosts(
        tuple(draw(_stage) for _ in range(stages)), tuple(draw(_link) for _ in range(stages - 1))
    )
    name = draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "h-1f1b"]))
    microbatches = draw(st.integers(1, 6))
    return costs, make_schedule(name, num_stages=stages, num_microbatches=microbatches, costs=costs)


def _played(costs, schedule, how):
    pipe = prepare(costs, schedule.lane_of, schedule.num_microbatches, schedule.has_weight)
    return pipe, how(pipe, numbered(schedule))


@settings(max_examples=100, deadline=None)
@given(_instances())
def test_two_engines_agree_where_all_links_overlap(instance):
    _, fast = _played(*instance, play)
    _, slow = _played(*instance, play_blocking)
    assert fast == slow


@settings(max_examples=100, deadline=None)
@given(_instances(), st.integers(0, 2))
def test_tasks_wait_for_their_inputs_and_wires_carry_one_transfer_at_a_time(instance, blocking):
    costs, schedule = instance
    links = [
        dataclasses.replace(link, overlaps=i != blocking) for i, link in enumerate(costs.links)
    ]
    costs = PipelineCosts(costs.stages, tuple(links))
    pipe, played = _played(costs, schedule, play)
    m = schedule.num_microbatches
    wires = {}
    for order in numbered(schedule):
        for number in order:
            block = pipe.blocks[number // m]
            if block.to >= 0:
                arrived = played.arrived_s[number]
                assert arrived >= played.end_s[number] + block.occupies_s + block.latency_s
                assert played.start_s[block.to * m + number % m] >= arrived
                for wire in block.wires:
                    wires.setdefault(wire, []).append((played.sent_s[number], block.occupies_s))
        spans = [(played.start_s[n], played.end_s[n]) for n in order]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for sent in wires.values():
        sent.sort()
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(sent))


def test_a_transfer_that_does_not_overlap_holds_both_lanes():
    stage = StageCost(1.0, 1.0)
    costs = PipelineCosts((stage, stage), (LinkCost(2.0, 2.0, overlaps=False),))
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=2, has_backward=False)
    _pipe, played = _played(costs, schedule, play)
    # F0 0-1, send 1-3, F1 on stage 0 and F0 on stage 1 3-4, send 4-6, F1 on stage 1 6-7
    assert played.makespan_s == 7.0
    free = PipelineCosts((stage, stage), (LinkCost(2.0, 2.0),))
    assert _played(free, schedule, play)[1].makespan_s == 6.0


def test_transfers_that_share_a_wire_queue_first_come_first_served():
    stage = StageCost(1.0, 1.0)
    link = LinkCost(3.0, 3.0, forward_wires=("nic",), backward_wires=("nic",))
    costs = PipelineCosts((stage, stage), (link,))
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=2)
    pipe, played = _played(costs, schedule, play)
    assert pipe.shared
    # two activations 1-7, second F of stage 1 7-8, gradients ready at 9 and 10
    assert played.makespan_s == 9 + 3 + 3 + 1


@pytest.mark.parametrize("how", [play, play_blocking])
def test_orders_that_wait_for_each_other_end_in_none(how):
    costs = PipelineCosts.equal(2, StageCost(1.0, 1.0), LinkCost(0.0, 0.0))
    pipe = prepare(costs, (0, 1), 2, has_weight=False)
    # stage 0: F0 B0 F1 B1; stage 1: F0 F1 B0 B1
    assert how(pipe, [[0, 4, 1, 5], [2, 3, 6, 7]]) is None


@pytest.mark.parametrize("how", [play, play_blocking])
def test_a_transfer_occupies_the_cards_of_sender_and_receiver(how):
    # stage 1 receives from stage 0 and sends to stage 2 through one card, one at a time
    stage = StageCost(1.0, 1.0)
    first = LinkCost(2.0, 2.0, forward_wires=("card of 0", "card of 1"))
    second = LinkCost(2.0, 2.0, forward_wires=("card of 1", "card of 2"))
    costs = PipelineCosts((stage,) * 3, (first, second))
    schedule = make_schedule("gpipe", num_stages=3, num_microbatches=2, has_backward=False)
    _, played = _played(costs, schedule, how)
    # 0→1 at 1-3 and 3-5; stage 1 runs 3-4 and 5-6; 1→2 at 5-7 and 7-9
    assert [played.sent_s[number] for number in (0, 1, 2, 3)] == [1.0, 3.0, 5.0, 7.0]
    assert played.makespan_s == 10.0
