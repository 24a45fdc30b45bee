"""Places of rest on a GPU are those of the CPU, with their gradients."""

import copy

import pytest
import torch

import gradlogz as gz

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("method", ["anderson", "newton", "iterate"])
@pytest.mark.parametrize("moving", [False, True])
def test_the_numbers_are_those_of_the_cpu(method, moving):
    torch.manual_seed(0)
    layer = gz.dynamics.EquilibriumAttention(
        32, 2, tau=0.5, method=method, moving=moving, max_iterations=500, dtype=torch.float64
    )
    s = torch.randn(3, 100, 32, dtype=torch.float64)

    def found(layer, s):
        x = layer(s := s.detach().requires_grad_())
        return [t.detach() for t in (x, *torch.autograd.grad(x.sin().sum(), [s, *layer.parameters()]))]

    expected = found(layer, s)
    actual = found(copy.deepcopy(layer).float().cuda(), s.float().cuda())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-3, atol=1e-3 * float(1 + e.abs().max()))
    radius = copy.deepcopy(layer).cuda().spectral_radius(s.cuda())
    torch.testing.assert_close(radius.cpu(), layer.spectral_radius(s), rtol=1e-2, atol=1e-2)


def test_particles_and_spins_are_drawn_there():
    W = torch.randn(6, 3, device="cuda")
    machine = gz.dynamics.boltzmann_machine(W, torch.zeros(6, device="cuda"), torch.zeros(3, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    draws = machine.chain(torch.zeros(50_000, 6, device="cuda"), 20, generator=generator).x[-1]
    law = gz.dynamics.visible_distribution(machine)
    second = (law.points.mT * law.log_weights.softmax(-1)) @ law.points  # means are 0 by symmetry
    torch.testing.assert_close(draws.mT @ draws / len(draws), second, rtol=0, atol=0.03)
    h, eta = gz.Gaussian(torch.zeros(2, device="cuda"), torch.eye(2, device="cuda")), torch.ones(2, device="cuda")
    keys = gz.measures.draw_particles(h, 50_000, generator=generator)
    found = gz.measures.anneal(keys, eta, move=gz.measures.metropolis_move(h), generator=generator)
    torch.testing.assert_close(found.log_normalizer, h.log_normalizer(eta), rtol=0, atol=0.05)
