"""Statistics of the probe on the GPU: the numbers of the CPU, and no waiting for the device while batches pass."""

import pytest
import torch

from gradlogz.probing.statistics import (
    bootstrap_weights,
    chosen,
    comoments_of,
    hash_of,
    histogram_of,
    merge,
    moment_columns,
    sample_of,
    sums_of,
    token_hashes,
)
from support.measure_registry import Source
from support.probe_models import tensors_of
from support.scales import close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

KEYS = torch.tensor([hash_of(f"document {i}") for i in range(8)])
HASHES = token_hashes(KEYS, torch.arange(64).expand(8, 64)).flatten()
EDGES = torch.linspace(-3, 3, 13)


def batch(x, y, valid, group):
    """All statistics of one batch [b, n, p], of whatever device; keys, hashes and the mask are on the CPU."""
    flat_x, flat_y = x.flatten(0, 1), y.flatten(0, 1)
    rows = chosen(HASHES, valid=valid.flatten(), size=50)
    return {
        "comoments": comoments_of(flat_x, flat_y, group=group, weights=valid.flatten()),
        "sums": sums_of(moment_columns(x.sum(-1), y.sum(-1), valid=valid), KEYS),
        "histogram": histogram_of(flat_x.mT, EDGES, valid=valid.flatten()),
        "sample": sample_of({"x": flat_x[rows.to(x.device, non_blocking=True)]}, HASHES[rows], size=50),
    }


def data(seed):
    s = Source(seed, torch.float32)
    return s.normal(8, 64, 48) + 100, s.normal(8, 64, 16), s.normal(8, 64) > -1


def test_a_document_has_the_same_hashes_and_weights():
    positions = torch.arange(64).expand(8, 64)
    assert torch.equal(token_hashes(KEYS.cuda(), positions.cuda()).cpu(), token_hashes(KEYS, positions))
    assert torch.equal(bootstrap_weights(KEYS.cuda()).cpu(), bootstrap_weights(KEYS))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_numbers_are_those_of_the_cpu_and_nothing_waits(precision):
    here, there = None, None
    inputs = [data(seed) for seed in range(3)]
    moved = [(x.cuda(), y.cuda(), valid) for x, y, valid in inputs]
    batch(*moved[0], group=0)  # what is made once and kept
    for group, each in enumerate(inputs):
        here = merge(here, batch(*each, group=group % 2))
    torch.cuda.set_sync_debug_mode("error")
    torch.set_float32_matmul_precision(precision)
    try:
        for group, each in enumerate(moved):
            there = merge(there, batch(*each, group=group % 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision("highest")
    assert there["comoments"].total().xx.is_cuda
    expected = tensors_of(here)
    for name, found in tensors_of(there).items():
        if found.dtype == torch.int64 or "sample" in name:
            assert torch.equal(found, expected[name]), name
        else:
            close(found, expected[name], expected[name].abs().max(), tolerance=1e-5)
