"""Derivatives of contrastive losses whose anchors and candidates are functions of the same vectors.

Anchors and candidates of most losses are the same vectors, or come from the same weights. A gradient with respect to
the one must not contain the path through the other, also where it is to be differentiated again.
"""

import pytest
import torch

import gradlogz as gz
from gradlogz.kernels.losses.pairwise_log_sum_exp import log_sum_exp
from gradlogz.kernels.losses.visible_pairs import VisiblePairs
from support.scales import close

c = gz.contrastive
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
LOSSES = {
    "info_nce": lambda z: c.info_nce(z, z, temperature=0.5),
    "info_nce, none": lambda z: c.info_nce(z, z.tanh(), reduction="none").square().sum(),
    "clip": lambda z: c.clip_loss(z, z * 2, temperature=0.5),
    "siglip": lambda z: c.siglip(z, z.roll(1, 0)),
    "nt_xent": lambda z: c.nt_xent(z[:3], z[3:], temperature=0.5),
    "supervised": lambda z: c.supervised_contrastive(z, LABELS, temperature=0.5),
    "supervised, pair": lambda z: c.supervised_contrastive(z, LABELS, denominator="pair"),
    "nca": lambda z: c.nca(z, LABELS),
    "multi_similarity": lambda z: c.multi_similarity_loss(z, LABELS, beta=3.0),
    "uniformity": lambda z: c.uniformity_loss(z),
}


def differences(f, z, h=1e-5):
    """Central differences of a function of one tensor, [outputs, inputs]."""
    steps = h * torch.eye(z.numel(), dtype=z.dtype).view(-1, *z.shape)
    return torch.stack([(f(z + e) - f(z - e)).flatten() / (2 * h) for e in steps], -1)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_that_can_be_differentiated_are_those_of_the_loss(name, leaf):
    loss = LOSSES[name]
    z = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(x, create_graph=False):
        x = x.detach().requires_grad_()
        operand = x if leaf else x * 1
        (slope,) = torch.autograd.grad(loss(operand), operand, create_graph=create_graph)
        return slope, x

    slope, x = gradient(z, create_graph=True)
    plain, _ = gradient(z)
    close(slope, plain, scale=float(plain.abs().max()) * 100)
    exact = differences(loss, z).view_as(z)
    assert float((slope - exact).detach().abs().max()) < 1e-7
    hessian = torch.stack([torch.autograd.grad(s, x, retain_graph=True)[0].flatten() for s in slope.flatten()])
    exact = differences(lambda at: gradient(at)[0], z)
    assert float((hessian - exact).abs().max()) < 1e-6


@pytest.mark.parametrize("visible", [VisiblePairs(), VisiblePairs(itself=False, labels=(torch.arange(200) % 3,) * 2)])
def test_gradients_of_large_log_sum_exp_can_be_differentiated(visible):
    """Here the kernels of attention compute the sum."""
    z = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden = visible.hidden(slice(None), 200, slice(None), 200, z.device)
    s = z @ (2 * z).mT
    definition = (s if hidden is None else s.masked_fill(hidden, -torch.inf)).logsumexp(-1).square().sum()
    (exact,) = torch.autograd.grad(definition, z, create_graph=True)
    (exact_second,) = torch.autograd.grad(exact.square().sum(), z)
    (slope,) = torch.autograd.grad(log_sum_exp(z, 2 * z, None, visible).square().sum(), z, create_graph=True)
    close(slope, exact, scale=float(exact.detach().abs().max()) * 10)
    (second,) = torch.autograd.grad(slope.square().sum(), z)
    close(second, exact_second, scale=float(exact_second.abs().max()) * 10)
