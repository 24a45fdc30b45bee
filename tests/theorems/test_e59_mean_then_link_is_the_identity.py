"""The mean map followed by the link of the SAME family is the identity: the alternation is trivial.   [theory E59]

The note on filters (4.1) hopes for a convergence of alternating updates of eta and mu. That needs two measures.
"""

import pytest
import torch

import gradlogz as gz
from support.densities import LAWS, law
from support.scales import close

# One-hot vectors sum to one, so that eta moves freely along 1: their link has no single answer.
FULL = [name for name in LAWS if name != "one hot"]


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("seed", range(3))
def test_one_family_leads_back(name, seed):
    at = law(name, seed)
    h, x, log_mass, eta = at
    p = (log_mass + x @ eta).softmax(-1)
    away = x - p @ x
    F = away.mT @ (p.unsqueeze(-1) * away)
    # A residual of the mean of 1e-12 moves eta by F⁻¹ times it.
    close(gz.mean_to_natural(h, h.mean(eta)), eta, 1 + at.scale() / torch.linalg.eigvalsh(F)[0], tolerance=1e-8)


def test_for_a_degenerate_family_it_leads_back_modulo_the_constant_directions():
    h, _, _, eta = law("one hot")
    close(gz.mean_to_natural(h, h.mean(eta)), eta - eta.mean(), 10.0, tolerance=1e-8)


def test_two_families_do_not_lead_back():
    h = gz.Spins(torch.zeros(2, dtype=torch.float64))
    g = gz.Gaussian(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    eta = torch.tensor([1.5, -2.0], dtype=torch.float64)
    assert float((gz.mean_to_natural(g, h.mean(eta)) - eta).norm()) > 0.5


def test_nor_does_a_linear_link():
    h = gz.Spins(torch.zeros(2, dtype=torch.float64))
    eta = torch.tensor([1.5, -2.0], dtype=torch.float64)
    F = h.covariance(torch.zeros(2, dtype=torch.float64))
    assert float((torch.linalg.solve(F, h.mean(eta)) - eta).norm()) > 0.5
