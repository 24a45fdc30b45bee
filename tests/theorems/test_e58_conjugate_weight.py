"""eta_i = f(mu_i) with f = (∇G)⁻¹, and the conjugate weight is exp(nu (<eta_i, mu_j> - G(eta_i))).   [theory E57, E58]

Eq. 15 of the note on filters prints f(eta_i) and drops G(eta_i). The weight is proportional to exp(-nu KL(mu_j‖eta_i)),
and is the plain softmax over eta only where all G(eta_i) are equal.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close

STATEMENTS = ("E58",)


def spins(seed, n=4, d=3):
    """Keys mu_j, natural parameters eta_i of independent spins, and G by hand."""
    s = Source(seed)
    eta, mu = s.normal(n, d), s.normal(n, d).tanh()
    return gz.Spins(torch.zeros(d, dtype=torch.float64)), eta, mu, torch.log(torch.cosh(eta)).sum(-1)


@given(seeds, st.sampled_from([0.5, 1.0, 4.0]))
def test_it_is_proportional_to_the_exponential_of_minus_the_divergence(seed, nu):
    h, eta, mu, G = spins(seed)
    linked = torch.atanh(mu)
    up = (1 + mu) / 2
    negative_entropy = (torch.xlogy(up, up) + torch.xlogy(1 - up, 1 - up)).sum(-1)
    log_two = 3 * torch.log(torch.tensor(2.0, dtype=torch.float64))
    kl = negative_entropy.unsqueeze(-1) + log_two + G - mu @ eta.mT  # of the law with mean mu_j from that at eta_i
    pairs = h.kl(linked.unsqueeze(1).expand(-1, 4, -1), eta.expand(4, -1, -1))
    close(pairs, kl, 3 * (1 + linked.abs().max() + eta.abs().max()))
    posterior = gz.Empirical(eta, -nu * h.log_normalizer(eta)).probabilities(nu * mu)
    close(posterior, (-nu * kl).softmax(-1), 1 + 3 * nu * eta.abs().max())


def test_without_g_the_weights_are_others_and_with_equal_g_they_are_not():
    h, eta, mu, _ = spins(0)
    plain = (mu @ eta.mT).softmax(-1)
    biased = gz.Empirical(eta, -h.log_normalizer(eta)).probabilities(mu)
    assert float((plain - biased).abs().max()) > 0.1
    level = eta[0].abs() * eta.sign()  # one |eta| for all rows: one G for all
    biased = gz.Empirical(level, -h.log_normalizer(level)).probabilities(mu)
    close(biased, (mu @ level.mT).softmax(-1), 1 + 3 * level.abs().max())
