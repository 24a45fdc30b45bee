"""A mixture of Gaussians that share their axes is an empirical measure in more coordinates.   [theory 6.1, 8.4]

On the right: the mixture by its definition, and derivatives of its log normaliser.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from gradlogz.measures.mixture import GaussianMessages
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

sizes = {"seed": seeds, "n": st.integers(1, 6), "d": st.integers(1, 4), "m": st.integers(1, 3)}


def parts(seed, n, d, m):
    s = Source(seed)
    return s.log_simplex(n), s.normal(n, d), s.positive(n, d, low=0.0), s.normal(m, d), s


@given(**sizes)
def test_diagonal_messages(seed, n, d, m):
    log_w, mu, c, eta, _ = parts(seed, n, d, m)
    h, messages = gz.Mixture(log_w, gz.Gaussian.diagonal(mu, c)), GaussianMessages(mu, c)
    points, query = gz.Empirical(messages.keys(), log_w), messages.queries(eta)
    close(points.log_normalizer(query), h.log_normalizer(eta), scale_of(h, eta, 0))
    close(messages.mean(eta, points.mean(query)), h.mean(eta), scale_of(h, eta))

    attended, seen = points.expect(messages.values(), query), torch.ones(m, dtype=torch.bool)
    mean, variance = messages.moments(eta, attended, seen)
    close(mean, h.mean(eta), scale_of(h, eta))
    scale = scale_of(h, eta, 2) + (mu.abs().max() + c.max() * eta.abs().max()) ** 2
    close(variance, h.covariance(eta).diagonal(dim1=-2, dim2=-1), scale)


@given(rank=st.integers(1, 3), **sizes)
def test_messages_along_few_directions(seed, n, d, m, rank):
    log_w, mu, _, eta, s = parts(seed, n, d, m)
    U, c = s.normal(d, rank), s.positive(n, rank, low=0.0)
    h = gz.Mixture(log_w, gz.Gaussian(mu, torch.einsum("dr,nr,er->nde", U, c, U), validate=False))
    messages = GaussianMessages(mu, c, U)
    points, query = gz.Empirical(messages.keys(), log_w), messages.queries(eta)
    close(points.log_normalizer(query), h.log_normalizer(eta), scale_of(h, eta, 0))
    close(messages.mean(eta, points.mean(query)), h.mean(eta), scale_of(h, eta))


@given(**sizes)
def test_the_moments_are_derivatives(seed, n, d, m):
    _, mu, c, eta, _ = parts(seed, n, d, m)
    messages = GaussianMessages(mu, c)

    def G(e):
        return (e @ mu.mT + (e * e) @ c.mT / 2).logsumexp(-1)

    found = gz.attend(messages.queries(eta), messages.keys(), messages.values(), scale=1.0)
    mean, variance = messages.moments(eta, found.output, found.seen)
    scale = (1 + found.max_logit.abs().max()) * (1 + mu.abs().max() + c.max() * eta.abs().max()) ** 2
    close(found.log_normalizer, G(eta), scale)
    close(mean, torch.func.grad(lambda e: G(e).sum())(eta), scale)
    close(variance, torch.func.vmap(lambda e: torch.func.hessian(G)(e).diagonal())(eta), scale)


def test_a_row_that_sees_nothing_has_moments_zero():
    messages = GaussianMessages(torch.randn(4, 3), torch.rand(4, 3))
    eta, mask = torch.randn(2, 3), torch.tensor([[True] * 4, [False] * 4])
    found = gz.attend(messages.queries(eta), messages.keys(), messages.values(), attn_mask=mask, scale=1.0)
    for moment in messages.moments(eta, found.output, found.seen):
        assert bool((moment[1] == 0).all())
        assert bool((moment[0] != 0).all())


@given(**sizes)
def test_weights_per_query_are_a_mixture_for_each_query(seed, n, d, m):
    """What masks need: a row of log weights for each query."""
    _, mu, c, eta, s = parts(seed, n, d, m)
    log_w, components = s.log_simplex(m, n), gz.Gaussian.diagonal(mu, c)
    whole = gz.Mixture(log_w, components)
    for i in range(m):
        one = gz.Mixture(log_w[i], components)
        for name, order in {"log_normalizer": 0, "mean": 1, "covariance": 2, "responsibilities": 0}.items():
            close(getattr(whole, name)(eta)[i], getattr(one, name)(eta[i]), scale_of(one, eta[i], order))
        close(whole.lower_bound(eta).gap[i], one.lower_bound(eta[i]).gap, scale_of(one, eta[i], 0))
    product = (whole.covariance(eta) @ eta.unsqueeze(-1)).squeeze(-1)
    close(whole.covariance_product(eta, eta), product, 10 * scale_of(whole, eta, 2))
