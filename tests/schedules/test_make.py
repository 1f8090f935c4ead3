import pytest

from hetpass.errors import ScheduleError
from hetpass.schedules import make_schedule, schedule_names


def _order(schedule, lane):
    return " ".join(f"{t.kind}{t.microbatch}" for t in schedule.lanes[lane].tasks)


def test_1f1b_warms_up_then_alternates():
    schedule = make_schedule("1f1b", num_stages=3, num_microbatches=4)
    assert _order(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _order(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert _order(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert schedule.in_flight == (3, 2, 1)


def test_gpipe_runs_all_forwards_first():
    schedule = make_schedule("gpipe", num_stages=2, num_microbatches=3)
    assert _order(schedule, 0) == _order(schedule, 1) == "F0 F1 F2 B0 B1 B2"
    assert schedule.in_flight == (3, 3)


def test_in_flight_counts_can_be_given_and_are_capped():
    schedule = make_schedule("1f1b", num_stages=3, num_microbatches=2, in_flight=(9, 2, 1))
    assert schedule.in_flight == (2, 2, 1)


def test_fewer_microbatches_than_stages_and_one_stage():
    assert make_schedule("1f1b", num_stages=4, num_microbatches=2).in_flight == (2, 2, 2, 1)
    assert _order(make_schedule("1f1b", num_stages=1, num_microbatches=2), 0) == "F0 B0 F1 B1"


@pytest.mark.parametrize("name", [n for n in ("gpipe", "1f1b", "eager-1f1b")])
def test_forward_only(name):
    schedule = make_schedule(name, num_stages=2, num_microbatches=3, has_backward=False)
    assert schedule.name == name
    assert _order(schedule, 1) == "F0 F1 F2"
    assert schedule.in_flight == (1, 1)
    assert not schedule.has_backward


def test_unknown_name_lists_the_nearest():
    with pytest.raises(ScheduleError, match="1f1b") as caught:
        make_schedule("1f1", num_stages=2, num_microbatches=2)
    assert caught.value.code == "HP-SCHEDULE-UNKNOWN"
    assert all(name in caught.value.ways_out[0] for name in schedule_names())


@pytest.mark.parametrize("counts", [(1, 2), (1,), (2, 0)])
def test_counts_that_cannot_run_are_refused(counts):
    with pytest.raises(ScheduleError) as caught:
        make_schedule("1f1b", num_stages=2, num_microbatches=4, in_flight=counts)
    assert caught.value.code == "HP-SCHEDULE-INFLIGHT"


def test_h_1f1b_needs_costs():
    with pytest.raises(ScheduleError) as caught:
        make_schedule("h-1f1b", num_stages=2, num_microbatches=4)
    assert caught.value.code == "HP-SCHEDULE-COST"


def test_prints_one_line_per_lane():
    text = str(make_schedule("1f1b", num_stages=2, num_microbatches=1))
    assert text == (
        "1f1b: 2 stages on 2 lanes, 1 microbatch, in flight 1 1\n"
        "  lane 0 (stage 0): F0 B0\n"
        "  lane 1 (stage 1): F0 B0"
    )
