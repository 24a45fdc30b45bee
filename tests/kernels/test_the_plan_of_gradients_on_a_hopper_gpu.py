"""The plan of the backward pass: every pair of tiles once, in an order in which all programs reach their end."""

import random

import pytest

from gradlogz.kernels.attention.backward_plan import FIRST, KEYS, LAST, plan, schedule

# Tokens, queries of a tile, left, right, programs, heads of keys, query heads of each.
CASES = [
    (4096, 64, None, None, 132, 64, 1),
    (4096, 128, None, 0, 132, 64, 1),
    (1000, 64, None, 0, 132, 6, 4),
    (777, 128, None, None, 132, 3, 2),
    (128, 64, None, None, 132, 1, 1),
    (100, 128, None, 0, 132, 1, 3),
    (1920, 64, None, 0, 7, 5, 1),  # 15 tiles of keys, and fewer programs than pairs of them
    (2500, 64, None, None, 7, 2, 2),
    (2048, 64, 300, 70, 132, 4, 1),
    (2000, 64, 100, 0, 5, 4, 2),
    (640, 128, 0, 0, 132, 1, 1),
    (640, 64, None, 200, 132, 1, 1),
    (640, 64, 200, None, 132, 1, 1),
]


def planned(n, rows, left, right, programs, units, group):
    return plan(schedule(n, rows, left, right, programs, units), group, -(-n // rows)).tolist()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_pair_of_tiles_that_sees_each_other_is_in_one_step(case):
    n, rows, left, right, programs, _, group = case
    table = planned(*case)
    assert len(table) <= programs
    seen = set()
    for query in range(n):
        low = 0 if left is None else max(0, query - left)
        high = n - 1 if right is None else min(n - 1, query + right)
        seen |= {(query // rows, j) for j in range(low // KEYS, high // KEYS + 1)}
    expected = sorted((i, j, member) for i, j in seen for member in range(group))
    assert sorted((i, j % FIRST, member) for steps in table for i, j, member, _ in steps if i >= 0) == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_tile_of_keys_is_in_consecutive_steps_of_one_program(case):
    for steps in planned(*case):
        current = None
        for i, j, _, _ in steps:
            if i < 0:
                assert current is None
                continue
            assert (current is None) == bool(j & FIRST)
            assert current in (None, j % FIRST)
            current = None if j & LAST else j % FIRST
        assert current is None


def finish(table, duration):
    """Time at which the last program ends, each of whose steps waits for its turn, or None if they wait for ever."""
    clock, place, added, free = [0.0] * len(table), [0] * len(table), {}, {}
    moved = True
    while moved:
        moved = False
        for worker, steps in enumerate(table):
            while place[worker] < len(steps) and steps[place[worker]][0] >= 0:
                i, _, member, rank = steps[place[worker]]
                if added.get((i, member), 0) != rank:
                    break
                end = max(clock[worker], free.get((i, member), 0.0)) + duration()
                clock[worker] = free[i, member] = end
                added[i, member] = rank + 1
                place[worker] += 1
                moved = True
    ended = all(place[w] == sum(step[0] >= 0 for step in steps) for w, steps in enumerate(table))
    return max(clock) if ended else None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_programs_reach_their_end_whoever_is_late(case):
    table, draw = planned(*case), random.Random(0)
    assert finish(table, lambda: draw.expovariate(1.0)) is not None


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_in_step_nobody_waits_and_all_have_the_same_work(case):
    table = planned(*case)
    assert all(step[0] >= 0 for steps in table for step in steps)
    assert finish(table, lambda: 1.0) == len(table[0])


def test_a_plan_in_which_two_wait_for_each_other_is_found():
    first, second = FIRST | LAST, FIRST | LAST | 1
    assert finish([[[0, first, 0, 1], [1, first, 0, 0]], [[1, second, 0, 1], [0, second, 0, 0]]], lambda: 1.0) is None


def test_many_programs_are_used():
    for n in (512, 1024, 4096, 10_240, 16_384, 40_000):
        for right in (None, 0):
            workers = len(schedule(n, 64, None, right, 132, 64))
            groups = min(64, 132 // workers)
            tiles = -(-n // KEYS)
            items = tiles if right is None else tiles - tiles // 2
            rounds = -(-64 // groups) * -(-items // workers)
            assert 64 * items / (132 * rounds) > 0.7, (n, right)
