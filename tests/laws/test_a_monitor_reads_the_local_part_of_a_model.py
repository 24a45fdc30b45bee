"""A monitor of a model that is split over processes, by heads or by layers, has the rows of the local part."""

import socket

import pytest
import torch

import gradlogz
from support.parallel_models import model, parallel_rank, quiet_monitor, step_of, train

KINDS = ["heads", "stage", "schedule"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(parallel_rank, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def records():
    """Records of the undivided model."""
    undivided = model()
    with quiet_monitor(undivided) as m:
        train(undivided.parameters(), step_of(undivided))
    return m.row().records()


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_is_bit_equal(ranks, kind):
    for results in ranks:
        (losses, parameters, _), (monitored_losses, monitored_parameters, _) = results[kind]
        assert losses == monitored_losses
        assert all(torch.equal(a, b) for a, b in zip(parameters, monitored_parameters, strict=True))


def same(found, expected):
    """Check that two lists of records have the same names and numbers."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, number in one.items():
            assert number == (other[name] if isinstance(number, str) else pytest.approx(other[name], abs=1e-12)), name


def test_split_by_heads_the_rows_are_those_of_the_local_heads(ranks, records):
    for rank, results in enumerate(ranks):
        heads = [r | {"head": r["head"] - 2 * rank} for r in records if r["head"] // 2 == rank]
        same(results["heads"][1][2], heads)


@pytest.mark.parametrize("kind", ["stage", "schedule"])
def test_split_by_layers_the_rows_are_those_of_the_local_layers(ranks, records, kind):
    for rank, results in enumerate(ranks):
        same(results[kind][1][2], [r for r in records if r["layer"] == str(rank)])


def test_the_joined_rows_of_stages_are_those_of_the_whole_model(ranks, records):
    for results in ranks:
        same(sorted(results["joined"][2], key=lambda r: r["layer"]), records)


@pytest.mark.parametrize("kind", ["heads", "stage", "joined"])
def test_qk_clip_scales_each_part_by_its_own_logits(ranks, kind):
    """The parameters are those of the clipped whole model: no process uses the logits of other heads or layers."""
    undivided = model()
    with quiet_monitor(undivided) as m:
        train(undivided.parameters(), step_of(undivided))
    factors = gradlogz.attention.qk_clip(undivided, m.row(), 1e-3)
    assert len({gamma.item() for each in factors.values() for gamma in each}) == 8
    whole = dict(undivided.named_parameters())
    for rank, results in enumerate(ranks):
        part = results["clipped"][kind]
        assert part.keys() == {name for name in whole if kind == "heads" or name.startswith(f"{rank}.")}
        assert all((whole[name] - p).abs().max() < 1e-12 for name, p in part.items())


def test_heads_of_different_processes_are_not_joined(ranks):
    for results in ranks:
        assert "tensor parallelism" in results["refusal"]
