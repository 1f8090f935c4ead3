from hetpass.ir.schedule import Task
from hetpass.schedules import LinkCost, PipelineCosts, StageCost, make_schedule
from hetpass.schedules.pipe import lanes_of, numbered, prepare, task


def test_tasks_are_numbered_by_kind_stage_microbatch():
    assert task(0, 3, 4) == Task("F", 0, 0)
    assert task((1 * 3 + 2) * 4 + 1, 3, 4) == Task("B", 2, 1)


def test_lanes_come_back_from_their_numbers():
    schedule = make_schedule("zb-v", num_stages=6, num_microbatches=5)
    assert lanes_of(numbered(schedule), schedule.lane_of, 5) == schedule.lanes


def test_weight_gradients_are_part_of_b_unless_they_are_tasks():
    costs = PipelineCosts.equal(1, StageCost(1.0, 2.0, 4.0))
    durations = [[b.duration_s for b in prepare(costs, (0,), 1, w).blocks] for w in (False, True)]
    assert durations == [[1.0, 6.0, 0.0], [1.0, 2.0, 4.0]]


def test_wires_are_per_direction_unless_named():
    link = LinkCost.from_bytes(100.0, 50.0, latency_s=0.5, bytes_per_s=25.0)
    assert (link.forward_s, link.backward_s, link.one_way_s) == (4.0, 2.0, 4.5)
    costs = PipelineCosts.equal(3, StageCost(1.0, 1.0), link)
    assert prepare(costs, (0, 1, 2), 1, False).wires == ("0→1", "1→2", "1→0", "2→1")
    assert prepare(costs, (0, 0, 1), 1, False).wires == ("1→2", "2→1")
    one = LinkCost.from_bytes(1.0, 1.0, latency_s=0.0, bytes_per_s=1.0, wires=("nic",))
    pipe = prepare(PipelineCosts.equal(3, StageCost(1.0, 1.0), one), (0, 1, 2), 1, False)
    assert pipe.wires == ("nic",)
    assert pipe.shared
