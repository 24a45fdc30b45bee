"""Clouds on a GPU move as on the CPU, and a step waits for nothing that its contraction does not wait for."""

import pytest
import torch

from gradlogz import Ascent, evolve
from gradlogz.dynamics.contraction import NAMES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# The others look at the spread of a cloud, to say where there is none.
WITHOUT_A_QUESTION = ("none", "center", "sphere", "rms_norm", "layer_norm", "shrinkage")


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("contraction", [*NAMES, "shrinkage"])
def test_a_cloud_moves_as_on_the_cpu(contraction):
    cloud = gaussian(3, 200, 24)
    cloud[1] *= 1e200  # which blows up
    ascent, names = Ascent(tau=0.5, beta=0.2), ("radius", "log_pair_energy", "self_weight", "entropy")
    here, there = (evolve(x, ascent, contraction=contraction, steps=3, observe=names) for x in (cloud, cloud.cuda()))
    assert here.blown.tolist() == there.blown.tolist() == [-1, 1, -1]
    torch.testing.assert_close(there.cloud.cpu(), here.cloud, rtol=1e-9, atol=1e-9)
    for name in names:
        seen = [t.observed[name].cpu()[:, ::2] for t in (here, there)]
        torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # of torch, which calls it a prototype
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("contraction", WITHOUT_A_QUESTION)
def test_a_step_does_not_wait(contraction, precision):
    cloud, ascent = gaussian(500, 64).float().cuda(), Ascent(tau=0.01, beta=0.1, precision=precision)
    evolve(cloud, ascent, contraction=contraction, steps=1)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = evolve(cloud, ascent, contraction=contraction, steps=3)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    exact = evolve(cloud.double().cpu(), Ascent(tau=0.01, beta=0.1), contraction=contraction, steps=3).cloud
    close = 1e-5 if precision is None else 1e-3
    torch.testing.assert_close(found.cloud.cpu().double(), exact, rtol=close, atol=close * float(exact.abs().max()))
