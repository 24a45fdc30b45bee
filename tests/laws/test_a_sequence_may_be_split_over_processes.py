"""`ring_attend` on the parts of a sequence is `attend` on the whole: every statistic, and gradients of all of them."""

import socket
from functools import cache

import pytest
import torch

from gradlogz import attend
from support.ring_ranks import CASES, TOKENS, loss, places, ring_rank, sequence
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


def test_blocks_of_keys_are_not_observed_as_attention(results_of):
    """Their statistics are those of a part of the keys; the layer is refused instead."""
    for results in results_of(2):
        assert "0 (RingAttention)" in results["observed"]


def test_autocast_is_that_of_attend(results_of):
    for results in results_of(2):
        assert results["autocast"] == (torch.bfloat16, torch.float32, torch.float32)
