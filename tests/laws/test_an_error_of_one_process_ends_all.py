"""An error in one process of a loss over several processes, or of `ring_attend`, ends the call in all of them."""

import socket
from time import monotonic

import pytest
import torch

from support.failing_ranks import (
    DIFFERENT,
    FAILING,
    OTHER_CALLS,
    PROCESSES,
    REFUSED,
    TIMEOUT,
    UNEQUAL,
    failing_rank,
    rank_that_ends,
)


def spawned(work, folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, str(folder)), nprocs=PROCESSES)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    spawned(failing_rank, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def check_named(reports):
    """The failing process raises its own error, the others one that names its rank."""
    for rank, (kind, message) in enumerate(reports):
        if rank == FAILING:
            assert kind != "ProcessError"
        else:
            assert kind == "ProcessError"
            assert f"rank {FAILING} has failed ({reports[FAILING][0]}: " in message
            assert reports[FAILING][1][:40] in message


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_an_argument_that_one_process_refuses_is_an_error_in_all(errors, way, name):
    check_named([e[way, name] for e in errors])


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_of_all_processes_likewise(errors, name):
    check_named([e["other", name] for e in errors])


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_tensors_that_differ_between_processes_are_refused_in_all(errors, way, name):
    for e in errors:
        kind, message = e[way, name]
        assert kind == "ProcessError"
        assert "same call" in message
        assert f"rank {FAILING}: " in message


@pytest.mark.parametrize("name", UNEQUAL)
def test_parts_of_a_sequence_that_differ_are_refused_in_all(errors, name):
    for e in errors:
        kind, message = e["unequal", name]
        assert kind == "ProcessError"
        assert f"rank {FAILING}: " in message


@pytest.mark.parametrize("call", ["info_nce", "ring_attend"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("block", range(PROCESSES))
def test_an_error_while_blocks_pass_is_an_error_in_all(errors, block, backward, call):
    check_named([e["middle", block, backward][call] for e in errors])


def test_the_processes_can_continue_after_an_error(errors):
    for e in errors:
        around, gathered = e["after"]
        torch.testing.assert_close(around, gathered)


def test_a_process_that_ends_is_reported_before_the_timeout(tmp_path):
    start = monotonic()
    spawned(rank_that_ends, tmp_path)
    assert monotonic() - start < TIMEOUT.total_seconds()
    for rank in set(range(PROCESSES)) - {FAILING}:
        kind, message = torch.load(tmp_path / f"{rank}.pt")
        assert kind == "ProcessError"
        assert "has ended or does not answer" in message
