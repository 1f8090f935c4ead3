from __future__ import annotations

from itertools import permutations

from hetpass.planner.resources import NO_STATE, START, any_order, any_order_states, one_run

DEVICES, SIZES = (2, 1, 4), ((1, 2), (1,), (2, 4))


def reachable(graph, groups=3):
    """Every sequence of (group, devices) that the graph allows."""
    found = set()

    def walk(group, state, path):
        found.add(path)
        for (p, g, n), moves in graph.moves.items():
            if p == group and moves[state] != NO_STATE:
                assert 0 <= moves[state] < graph.counts[g]
                walk(g, int(moves[state]), (*path, (g, n)))

    walk(START, 0, ())
    return found


def expected(runs, order=None):
    found = set()

    def walk(left, path):
        found.add(path)
        for g in range(len(left)):
            for n in SIZES[g]:
                used = [step[0] for step in path]
                again = runs and g in used and used[-1] != g
                ordered = order is None or (
                    g in order and (not used or order.index(g) >= order.index(used[-1]))
                )
                if n <= left[g] and not again and ordered:
                    rest = [*left]
                    rest[g] -= n
                    walk(rest, (*path, (g, n)))

    walk(list(DEVICES), ())
    return found


def test_any_order_allows_every_sequence_of_parts():
    assert reachable(any_order(DEVICES, SIZES)) == expected(runs=False)
    assert any_order_states(DEVICES, SIZES) == any_order(DEVICES, SIZES).num_states


def test_one_run_allows_every_order_of_groups():
    graph = one_run(DEVICES, SIZES)
    assert reachable(graph) == expected(runs=True)
    assert graph.num_states < any_order_states(DEVICES, SIZES)


def test_a_given_order():
    for order in [*permutations(range(3)), (2, 0)]:
        assert reachable(one_run(DEVICES, SIZES, order)) == expected(True, order)
