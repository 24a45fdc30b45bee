"""`ring_attend` on the parts of a sequence is `attend` on the whole: every statistic, and gradients of all of them."""

import socket
from functools import cache

import pytest
import torch

import gradlogz
from gradlogz import attend
from gradlogz.attention.ring_parts import Layout
from support.ring_ranks import (
    CASES,
    MONITORED,
    TOKENS,
    RingAttention,
    loss,
    places,
    ring_rank,
    sequence,
    tokens,
    trained,
)
from support.scales import close

PROCESSES = [2, pytest.param(3, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    @cache
    def started(processes):
        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.spawn(ring_rank, (processes, port, str(folder)), nprocs=processes)
        return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]

    return started


def same_as_attend(parts, case):
    """Check fields and gradients of the parts, in the order of ranks, against the whole sequence."""
    tensors, options = sequence(case), {name: value for name, value in CASES[case].items() if name != "placement"}
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
    expected = attend(*tensors, **options)
    *gradients, of_sinks = torch.autograd.grad(loss(expected), [*tensors, options.get("sinks", tensors[0])])
    placement = CASES[case].get("placement", "contiguous")
    order = torch.cat([places(rank, len(parts), placement) for rank in range(len(parts))]).argsort()

    def whole(tensors):
        joined = torch.cat(tensors, 2)
        return joined if joined.shape[2] > TOKENS else joined[:, :, order]

    for number, field in enumerate(expected):
        if field is None:
            assert all(fields[number] is None for fields, _ in parts)
        else:
            field = field.detach()
            scale = 1 + field.masked_fill(field == -torch.inf, 0.0).abs().max()
            close(whole([fields[number] for fields, _ in parts]), field, scale)
    for number, gradient in enumerate(gradients):
        close(whole([gradients[number] for _, gradients in parts]), gradient, 1 + gradient.abs().max())
    if "sinks" in options:
        close(sum(gradients[3] for _, gradients in parts), of_sinks, 1 + of_sinks.abs().max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("processes", PROCESSES)
def test_parts_have_the_rows_and_gradients_of_the_whole(results_of, processes, case):
    same_as_attend([results[case] for results in results_of(processes)], case)


@pytest.mark.long
def test_a_group_may_be_some_of_the_processes(results_of):
    same_as_attend([results["pair"] for results in results_of(3)[1:]], "causal")


def test_unequal_parts_are_refused_in_every_process(results_of):
    for results in results_of(2):
        assert "3 queries and 3 keys, 4 queries and 4 keys" in results["refusal"]


def test_the_largest_logit_has_one_gradient_even_if_several_keys_attain_it(results_of):
    """Each process has one query of ones: its unit of gradient reaches one key."""
    gradients = torch.cat([results["equal logits"] for results in results_of(2)], 2)
    assert gradients.sum() == 2 * 2
    assert set(gradients.flatten().tolist()) <= {0.0, 1.0, 2.0}


@pytest.mark.parametrize("processes", PROCESSES)
def test_no_process_keeps_the_blocks_of_others(results_of, processes):
    for results in results_of(processes):
        kept, local = results["kept"]
        assert kept <= local


@pytest.mark.parametrize("case", MONITORED)
@pytest.mark.parametrize("processes", PROCESSES)
def test_a_monitor_reads_the_rows_of_all_processes(results_of, processes, case):
    """The rows of the whole sequence in every process, the same training bit for bit, and no more calls of a kernel."""
    _, expected, _ = trained(case)
    for results in results_of(processes):
        (weights, records, calls), (plain_weights, _, plain_calls) = results["monitored", case]
        assert all(map(torch.equal, weights, plain_weights))
        # Each block is computed forward and backward, and where no statistics are asked for, once more for them.
        assert 2 * calls == (3 if case == "nothing asked" else 2) * plain_calls
        for record, other in zip(records, expected, strict=True):
            assert (record.pop("layer"), record.pop("kind")) == (other["layer"], other["kind"])
            assert record == pytest.approx({name: other[name] for name in record}, rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("processes", PROCESSES)
def test_observed_rows_are_those_of_the_local_queries(results_of, processes):
    model, x = RingAttention("nothing asked"), tokens()
    with gradlogz.observe(model) as observation:
        model(x)
    expected = observation[""].entropy.detach().chunk(processes, 2)
    for rows, results in zip(expected, results_of(processes), strict=True):
        entropy, differentiable = results["observed"]
        close(entropy, rows)
        assert differentiable


def test_autocast_is_that_of_attend(results_of):
    for results in results_of(2):
        assert results["autocast"] == (torch.bfloat16, torch.float32, torch.float32)


BANDS = [(None, 0), (3, 0), (5, 2), (None, 4), (4, None), (0, 0), (11, 7), (40, 40), (None, None)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pairs_of_parts_cover_every_visible_pair_of_tokens_once(ranks, placement, band):
    n, (left, right) = 6, band
    layout = Layout(ranks, placement, n, n, band)
    chunks = torch.arange(n * ranks).chunk(ranks if placement == "contiguous" else 2 * ranks)
    positions = [
        chunks[r] if placement == "contiguous" else torch.cat([chunks[r], chunks[-1 - r]]) for r in range(ranks)
    ]
    at = torch.arange(n * ranks)
    difference = at - at[:, None]  # of a key from a query
    visible = (difference >= (-n * ranks if left is None else -left)) & (
        difference <= (n * ranks if right is None else right)
    )
    computed = torch.zeros_like(visible, dtype=torch.long)
    for rank in range(ranks):
        for other in range(ranks):
            for pair in layout.pairs(rank, other):
                queries, keys = positions[rank][pair.rows], positions[other][pair.keys]
                low, high = (
                    None if side is None else sign * side for side, sign in zip(pair.window, (-1, 1), strict=True)
                )
                local = torch.arange(len(keys)) - torch.arange(len(queries))[:, None]
                inside = torch.ones_like(local, dtype=torch.bool)
                inside &= True if low is None else local >= low
                inside &= True if high is None else local <= high
                computed[queries[:, None], keys] += inside
    assert torch.equal(computed, visible.long())


def causal_work(ranks, placement):
    """Visible pairs of tokens that each rank computes."""
    layout = Layout(ranks, placement, 64, 64, (None, 0))
    work = []
    for rank in range(ranks):
        each = [pair for other in range(ranks) for pair in layout.pairs(rank, other)]
        sizes = [(p.rows.stop - p.rows.start, p.keys.stop - p.keys.start, p.same) for p in each]
        work.append(sum(m * (m + 1) // 2 if same else m * n for m, n, same in sizes))
    return work


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_placement_gives_every_rank_the_same_causal_work(ranks):
    work, contiguous = causal_work(ranks, "zigzag"), causal_work(ranks, "contiguous")
    assert len(set(work)) == 1
    assert sum(work) == sum(contiguous) == 64 * ranks * (64 * ranks + 1) // 2
    assert contiguous[-1] / contiguous[0] > 2 * ranks - 2


def test_keys_beyond_every_window_are_not_sent():
    def steps(band, placement="contiguous"):
        return Layout(8, placement, 64, 64, band).steps()

    assert [steps((0, 0)), steps((1, 0)), steps((64, 0)), steps((65, 0)), steps((None, 0))] == [1, 2, 2, 3, 8]
