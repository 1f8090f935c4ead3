from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hetpass.planner.shares import Pace, shared_out

PACES = st.builds(
    Pace,
    st.integers(1, 20).map(float),
    st.integers(1, 10).map(float),
    st.integers(1, 3),
)


def end_s(paces, shares):
    return max(
        pace.first_s + (n - 1) * pace.period_s
        for pace, numbers in zip(paces, shares, strict=True)
        for n in numbers
        if n
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.lists(PACES, min_size=1, max_size=2))
def test_nothing_ends_earlier(microbatches, paces):
    shares = shared_out(microbatches, paces)
    assert [len(numbers) for numbers in shares] == [pace.count for pace in paces]
    assert sum(map(sum, shares)) == microbatches
    columns = sum(pace.count for pace in paces)
    best = float("inf")
    for numbers in itertools.product(range(microbatches + 1), repeat=columns):
        if sum(numbers) == microbatches:
            parts, start = [], 0
            for pace in paces:
                parts.append(numbers[start : start + pace.count])
                start += pace.count
            best = min(best, end_s(paces, parts))
    assert end_s(paces, shares) <= best * (1 + 1e-9)


def test_twice_the_pace_takes_twice_the_share():
    assert shared_out(9, [Pace(1.0, 1.0, 1), Pace(2.0, 2.0, 1)]) == ((6,), (3,))
