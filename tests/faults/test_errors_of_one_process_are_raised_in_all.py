"""An error in one process of a contrastive loss leaves no other process waiting, and none out of step afterwards."""

import pytest
import torch

import gradlogz as gz
from gradlogz.contrastive import distributed
from support.distributed_ranks import ALONE, REFUSED, batch, failing_rank
from support.scales import close
from support.spawned_ranks import spawned


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return spawned(failing_rank, tmp_path_factory.mktemp("failing"), 3)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", [*REFUSED, "shape"])
def test_refused_arguments_of_one_process_are_raised_in_all(results, name, ring):
    errors = [result[f"{name} {ring}"][0] for result in results]
    assert errors[1].startswith("InputValueError")
    for other in (errors[0], errors[2]):
        assert other.startswith("OtherProcessError")
        assert "rank 1" in other


@pytest.mark.parametrize("name", ALONE)
def test_errors_of_calls_that_are_no_losses_are_raised_in_all(results, name):
    errors = [result[name][0].partition(":")[0] for result in results]
    assert errors == ["OtherProcessError", "InputValueError", "OtherProcessError"]


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", ["ids", "log_weights"])
def test_wrong_lengths_are_refused_where_those_of_all_have_the_right_sum(results, name, ring):
    errors = [result[f"{name} {ring}"][0].partition(":")[0] for result in results]
    assert errors == ["OtherProcessError", "InputValueError", "InputValueError"]


def test_ring_info_nce_raises_in_all(results):
    errors = [result["ring_info_nce"][0].partition(":")[0] for result in results]
    assert errors == ["OtherProcessError", "InputValueError", "OtherProcessError"]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("block 2 mean", "OtherProcessError"),
        ("block 2 sum", "OtherProcessError"),
        ("block 5 mean", ""),  # in the backward pass
        ("block 5 sum", ""),
    ],
)
def test_a_ring_goes_on_when_a_block_fails(results, name, others):
    errors = [result[name][0].partition(":")[0] for result in results]
    assert errors == [others, "OutOfMemoryError", others]


@pytest.mark.parametrize(
    ("backends", "tensors", "device"),
    [
        ("cpu:gloo,cuda:nccl", ["meta"], "cpu"),
        ("cuda:nccl", ["cpu", "meta"], "meta"),  # the tensors of a failing call may be on several devices
        ("cuda:nccl", ["cpu"], "cuda:3"),
    ],
)
def test_processes_exchange_sizes_on_one_kind_of_device(backends, tensors, device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    arguments = "mean", None, *(torch.empty(1, device=t) for t in tensors)
    assert distributed._device_of_sizes(None, arguments) == torch.device(device)


def test_a_mean_over_no_anchors_is_zero(monkeypatch):
    """Labels on a GPU are not read, so that all of them may be different."""
    monkeypatch.setattr(distributed, "sizes_of_batches", lambda *_: [0, 0])
    assert distributed.mean_over_processes(torch.zeros(()), 0, torch.device("cpu"), None) == 0


def test_processes_are_in_step_afterwards(results):
    a, b = batch()
    expected = gz.info_nce(a, b)
    assert len(results[0]) == 2 * (len(REFUSED) + 3) + len(ALONE) + 5
    for result in results:
        for _, values in result.values():
            for value in values:
                close(value, expected, 1000.0)
