"""What the watchdog says, told what is heard."""

from __future__ import annotations

import pytest

from hetpass.errors import ExecutionError
from hetpass.runtime.watchdog import Limits, Status, Watch

LIMITS = Limits(silent_s=5.0, stuck_s=60.0)


@pytest.fixture
def watch():
    watch = Watch(["'fast'", "'slow'"], LIMITS, now_s=0.0)
    watch.runs(0, [0, 2])
    watch.runs(1, [1])
    return watch


def hear(watch, now_s, counts, busy=True):
    for place, count in enumerate(counts):
        last = {place: ("forward 1", f"backward {count}")}
        watch.heard(Status(place, count, busy, last), now_s)


def test_nothing_is_wrong_while_all_answer(watch):
    for second in range(100):
        hear(watch, float(second), (second, 2 * second))
        assert watch.verdict(second + 0.5) is None


def test_a_death_names_stages_and_last_tasks(watch):
    hear(watch, 1.0, (7, 9))
    watch.died(1, "killed by signal 9")
    error = watch.verdict(1.1)
    assert error.code == "HP-RUN-LOST"
    assert error.where == "stage 1"
    assert "process 1 ('slow')" in error.what
    assert "killed by signal 9" in error.details[0]
    assert "stage 0 began last: forward 1, backward 7" in str(error)
    assert "stage 1 began last: forward 1, backward 9" in str(error)


def test_silence_is_told_after_the_limit(watch):
    hear(watch, 1.0, (7, 9))
    for second in range(1, 6):
        watch.heard(Status(0, second, True), float(second))
        assert watch.verdict(float(second)) is None
    assert watch.verdict(5.9) is None
    error = watch.verdict(6.1)
    assert error.code == "HP-RUN-SILENT"
    assert error.where == "stage 1"


def test_a_call_that_does_not_go_on_is_stuck(watch):
    for second in range(1, 61):
        hear(watch, float(second), (7, 9))
        assert watch.verdict(float(second)) is None
    assert watch.verdict(60.9) is None
    assert watch.verdict(61.1).code == "HP-RUN-STUCK"


def test_one_that_goes_on_is_not_stuck(watch):
    for second in range(1, 200):
        hear(watch, float(second), (7, 9 + second // 50))
        assert watch.verdict(float(second)) is None


def test_nobody_is_blamed_for_our_own_sleep(watch):
    hear(watch, 1.0, (7, 9))
    assert watch.verdict(1.0) is None
    assert watch.verdict(1000.0) is None
    assert watch.verdict(1002.0) is None
    assert watch.verdict(1004.0) is None
    assert watch.verdict(1005.5).code == "HP-RUN-SILENT"


def test_idle_processes_are_not_stuck(watch):
    for second in range(1, 200):
        hear(watch, float(second), (7, 9), busy=False)
        assert watch.verdict(float(second)) is None


def test_an_error_is_told_with_the_last_tasks(watch):
    hear(watch, 1.0, (7, 9))
    error = watch.explained(ExecutionError("HP-RUN-PEER", "lost", details=("why",)))
    assert error.code == "HP-RUN-PEER"
    assert error.details[0] == "why"
    assert "stage 1 began last" in error.details[2]


def test_limits_are_positive():
    with pytest.raises(ExecutionError, match="HP-RUN-LIMITS"):
        Limits(silent_s=0)
