"""The log normaliser of a joint over its hidden variable is the log evidence; the ELBO lies below it.   [theory E19]

    log p(x) = <log p(x, z)>_q + H(q) + KL(q‖p(z | x))

The paper (2.4) calls the log normaliser itself the evidence lower bound.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

sizes = {"seed": seeds, "n": st.integers(1, 7), "d": st.integers(1, 4)}


def model(seed, n, d):
    """z picks one of n centres by a prior, x ~ N(centre, I): log p(x, z) for all z, and the same as a measure."""
    s = Source(seed)
    centres, log_prior, x = s.normal(n, d), s.log_simplex(n), s.normal(d)
    log_joint = log_prior - (x - centres).square().sum(-1) / 2 - d * math.log(2 * math.pi) / 2
    base = -x.square().sum() / 2 - d * math.log(2 * math.pi) / 2  # what the query alone contributes
    return gz.Empirical(centres, log_prior - centres.square().sum(-1) / 2), x, log_joint, base, s


@given(**sizes)
def test_the_log_normalizer_is_the_log_evidence(seed, n, d):
    h, x, log_joint, base, _ = model(seed, n, d)
    close(h.log_normalizer(x) + base, log_joint.exp().sum().log(), scale_of(h, x, 0) + base.abs())


@given(**sizes)
def test_attention_weights_are_the_posterior(seed, n, d):
    h, x, log_joint, _, _ = model(seed, n, d)
    close(h.probabilities(x), log_joint.exp() / log_joint.exp().sum(), scale_of(h, x, 0))


@given(**sizes)
def test_the_bound_is_below_it_by_the_divergence_from_the_posterior(seed, n, d):
    h, x, log_joint, base, s = model(seed, n, d)
    log_q = s.log_simplex(n)
    q = log_q.exp()
    bound = q @ (log_joint - log_q)
    posterior = log_joint.log_softmax(-1)
    evidence = h.log_normalizer(x) + base
    close(evidence - bound, q @ (log_q - posterior), scale_of(h, x, 0) + base.abs())
    assert float(bound) <= float(evidence) + 1e-12
    # The mixture of one-point measures has the same bound.
    mixture = gz.Mixture(torch.log_softmax(h.log_weights, -1), gz.Empirical(h.points.unsqueeze(-2)))
    close(
        mixture.lower_bound(x, log_q).value + h.log_weights.logsumexp(-1) + base, bound, scale_of(h, x, 0) + base.abs()
    )


def test_with_the_prior_in_place_of_the_posterior_the_bound_is_not_the_log_normalizer():
    h, x, log_joint, base, _ = model(0, 5, 3)
    log_prior = h.log_weights + h.points.square().sum(-1) / 2
    bound = log_prior.exp() @ (log_joint - log_prior)
    assert float(h.log_normalizer(x) + base - bound) > 0.1
