"""The producer and the consumers of the Hopper kernel wait for each other, and for nothing that does not come.

The source of the kernel runs in plain Python with its barriers, in a drawn order (support/simulated_hopper.py). Each
consumer must then have multiplied each tile of queries with each tile of keys that it sees, and its weights with
the values of the same tokens.
"""

import itertools
import random

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from gradlogz.kernels.attention import hopper
from gradlogz.kernels.attention.segment_spans import SegmentSpans
from support import simulated_hopper
from support.simulated_hopper import SOURCE, Program, Sizes

pytestmark = pytest.mark.usefixtures("bounds_of_loops")

QUERIES, ROWS, KEYS = 64, hopper.ROWS.value, hopper.KEYS.value  # of a consumer, a program, and a tile of keys


def documents(*lengths: int) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


EIGHT = documents(300, 700, 512, 130, 1000, 454, 900, 100)  # those of the benchmark
OF_EACH_BATCH = torch.stack([documents(500, 600), documents(1100), documents(*[10] * 110).flip(0)])
# Batch, heads, heads of keys, queries, keys, left, right, segments, programs.
CALLS = {
    "full": (2, 2, 2, 512, 512, None, None, None, 5),
    "one program": (1, 3, 1, 1000, 1000, None, 0, None, 1),
    "window, last queries": (1, 2, 1, 300, 1111, 200, 10, None, 3),
    "own key alone": (1, 1, 1, 1300, 1300, 0, 0, None, 2),
    "8 documents": (1, 2, 2, 4096, 4096, None, None, EIGHT, 3),
    "8 documents, causal": (2, 2, 1, 4096, 4096, None, 0, EIGHT, 132),
    "8 documents of 512": (1, 2, 2, 4096, 4096, None, 0, documents(*[512] * 8), 3),
    "256 documents": (1, 1, 1, 4096, 4096, None, 0, documents(*[16] * 256), 1),
    "documents in two parts": (1, 2, 1, 2500, 2500, None, None, documents(900, 700, 900) % 2, 3),
    "interleaved documents": (1, 1, 1, 640, 2304, 300, None, torch.arange(2304) % 3, 2),
    "documents of each batch": (3, 2, 2, 700, 1100, None, 0, OF_EACH_BATCH, 4),
}  # fmt: skip


def run(call, code=None) -> list[Program]:
    b, h, hk, m, n, left, right, segments, count = call
    spans = None
    if segments is not None:
        segments = segments.reshape(-1, n)
        spans, _ = SegmentSpans((n - m, m, ROWS), (0, n, KEYS)).computed(segments, 0)
    table = hopper._plan(m, n, b * h, left, None if segments is not None else right, count)
    code = simulated_hopper.code() if code is None else code
    programs = [Program(i, code, random.Random(i)) for i in range(len(table))]
    for program in programs:
        program.run(table, spans, Sizes(h, b * h, m, n, left, right, h // hk))
    return programs


def visible(call) -> torch.Tensor:
    """Pairs of a query and a key, [b, m, n]."""
    b, _, _, m, n, left, right, segments, _ = call
    at, key = torch.arange(n - m, n)[:, None], torch.arange(n)
    pairs = torch.ones(b, m, n, dtype=torch.bool)
    if left is not None:
        pairs &= key >= at - left
    if right is not None:
        pairs &= key <= at + right
    if segments is not None:
        pairs &= segments.reshape(-1, n)[:, n - m :, None] == segments.reshape(-1, 1, n)
    return pairs


@pytest.mark.parametrize("name", CALLS)
def test_every_wait_ends_and_every_query_meets_its_keys(name):
    agree_with_definition(CALLS[name])


def agree_with_definition(call, code=None) -> None:
    b, h, hk, m, n, *_ = call
    programs, pairs = run(call, code), visible(call)
    met: dict[tuple[int, ...], bool] = {}
    for program in programs:
        for products, values in zip(program.products, program.values, strict=True):
            # The first product adds values of zeros.
            assert values[1:] == [(p.batch, p.key_head, p.first_key) for p in products]
            assert values[0] == (0, 0, n)
            for p in products:
                assert p.key_head == p.head // (h // hk)
                place = p.batch, p.head, p.first_query, p.first_key
                assert place not in met
                met[place] = p.masked
    firsts = list(itertools.product(range(b), range(h), range(0, -(-m // ROWS) * ROWS, QUERIES)))
    assert sorted(place for program in programs for place in program.stored) == firsts
    for batch, head, q in firsts:
        for k in range(0, n, KEYS):
            tile = pairs[batch, q : q + QUERIES, k : k + KEYS]
            masked = met.get((batch, head, q, k))  # None: left out
            assert masked is not None or not tile.any()
            assert masked is not False or (tile.all() and k + KEYS <= n)


def test_tiles_of_other_documents_are_left_out():
    call = CALLS["8 documents of 512"]
    products = sum(len(each) for program in run(call) for each in program.products)
    heads, tiles = 2, 512 // KEYS
    assert products == heads * 8 * 512 // QUERIES * (tiles + 1) / 2  # the lower triangle, of tiles of 128 queries


# What the simulation must notice: a line of the kernel, another one in its place, and the problem.
DEFECTS = {
    "a slot is not released": ("            mbarrier.arrive(released, count=1)\n", "", "wait forever"),
    "a consumer sees tiles of other documents": (
        "begin, end = _tiles_of_keys(start, m, n, left, right, span, packing)\n        start += CONSUMER",
        "begin, end = 0, gl.cdiv(n, KEYS)\n        start += CONSUMER",
        "wait forever",
    ),
    "the last values are not loaded": (
        "[v_batch, v_head, n, 0], [v_batch",
        "[v_batch, v_head, n, 0], [1 + v_batch",
        None,
    ),
    "the producer does not wait": (
        "    mbarrier.wait(released.index(i), ((slot // SLOTS) & 1) ^ 1)\n",
        "    mbarrier.wait(released.index(i), (released.index(i).phases & 1) ^ 1)\n",
        None,
    ),
    "queries have the phase of each turn": (
        "mbarrier.wait(q_loaded.index(q_slot), (turn // Q_SLOTS) & 1)",
        "mbarrier.wait(q_loaded.index(q_slot), turn & 1)",
        "wait forever",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_noticed(name):
    line, other, problem = DEFECTS[name]
    assert SOURCE.count(line) == 1
    with pytest.raises(AssertionError, match=problem):
        agree_with_definition(CALLS["8 documents of 512"], simulated_hopper.code(SOURCE.replace(line, other)))
