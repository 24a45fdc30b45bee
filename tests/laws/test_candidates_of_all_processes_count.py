"""Losses over several processes are those of the whole batch: by gathering and around a ring, values and gradients."""

import pytest
import torch

import gradlogz as gz
from support.distributed_ranks import (
    GROUPED,
    LABELS,
    RING,
    SIZES,
    batch,
    contrastive_rank,
    encoder,
    grouped,
    ring_rank,
    ring_results,
)
from support.scales import close
from support.spawned_ranks import spawned


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return spawned(contrastive_rank, tmp_path_factory.mktemp("ranks"), 2)


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    return spawned(ring_rank, tmp_path_factory.mktemp("ring"), 3)


def whole(a, b, **options):
    return gz.info_nce(a, b, temperature=0.1, **options)


@pytest.mark.parametrize("way", ["gather", "ring"])
def test_the_loss_and_its_gradient_are_those_of_the_whole_batch(found, way):
    model = encoder()
    x, y = batch()
    loss = whole(model(x), model(y), reduction="sum")
    (expected,) = torch.autograd.grad(loss, model.weight)
    close(sum(f[way][0] for f in found), loss.detach(), 1000.0)
    for f in found:
        close(f[way][1], expected, 1e4)


def test_averaged_gradients_are_those_of_the_mean(found):
    model = encoder()
    x, y = (torch.cat([t[:3], t[SIZES[0] : SIZES[0] + 3]]) for t in batch())
    loss = whole(model(x), model(y), normalize=True)
    (expected,) = torch.autograd.grad(loss, model.weight)
    for f in found:
        close(f["averaged"], expected, 1000.0)


def test_gathering_can_be_differentiated_twice(found):
    """The squared gradients of all, with respect to each: processes help each other in the second pass too."""
    x, y = batch()
    b = encoder()(y).detach().requires_grad_()
    parts = [
        gz.info_nce(x[r, :3], b, positive=torch.zeros(len(x[r]), dtype=torch.long))
        for r in (slice(0, SIZES[0]), slice(SIZES[0], None))
    ]
    (slope,) = torch.autograd.grad(sum(parts), b, create_graph=True)
    (expected,) = torch.autograd.grad(slope.square().sum(), b)
    close(torch.cat([f["twice"] for f in found]), expected, 1000.0)


def test_a_queue_holds_the_vectors_of_all_processes(found):
    """Also after DistributedDataParallel has copied the buffers of the first process."""
    expected = [0, 1, 1, 10, 11, 11]
    for f in found:
        assert f["queue"] == (expected, expected)


@pytest.mark.parametrize("name", GROUPED)
def test_losses_with_a_group_are_those_of_the_whole_batch(found, name):
    """Batches of five and three pairs: averages over processes are the mean over all pairs."""
    value, gradient = grouped(*batch(), LABELS, None)[name]
    for f in found:
        close(f["grouped"][name][0], value, 100.0)
        close(f["grouped"][name][1], gradient, 1000.0)


@pytest.mark.parametrize("name", RING)
def test_losses_around_a_ring_are_those_of_the_whole_batch(around, name):
    """Batches of four, one and three pairs; gradients of the encoder, of a factor of the vectors and of an offset."""
    expected = ring_results(*batch(), LABELS)[name]
    for f in around:
        for actual, value in zip(f[name], expected, strict=True):
            close(actual, value, 1000.0)
