"""The contrastive likelihood is an exponential family in eta = anchor / temperature.   [theory 3.5, 6.6, E31]

Gradient = attention - positive, second derivative = Fisher information, log n - loss bounds the mutual information.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
MASK = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) > 0.4

# name: options, and which of the six candidates each of six anchors chooses from.
KINDS = {
    "plain": (lambda s: {}, torch.ones(6, 6).bool()),
    "weighted": (lambda s: {"log_weights": s.normal(6)}, torch.ones(6, 6).bool()),
    "by index": (lambda s: {"positive": torch.tensor([3, 3, 0, 1, 5, 2])}, torch.ones(6, 6).bool()),
    "others": (
        lambda s: {"exclude_self": True, "positive": torch.arange(6).roll(1), "log_weights": s.normal(6)},
        ~torch.eye(6).bool(),
    ),
    "ids": (lambda s: {"ids": LABELS}, (LABELS.unsqueeze(-1) != LABELS) | torch.eye(6).bool()),
    "mask": (lambda s: {"mask": MASK, "log_weights": s.normal(6)}, MASK | torch.eye(6).bool()),
    "outside": (lambda s: {"positive": s.normal(6, 3), "log_weights": s.normal(6)}, torch.ones(6, 6).bool()),
}


def candidates_of(i, family, seen):
    """The points that anchor i chooses from, their log weights, and the place of the positive."""
    x = family.candidates[seen[i]]
    w = torch.zeros(6, dtype=x.dtype) if family.log_weights is None else family.log_weights
    w = w[seen[i]]
    if family.positive is not None and family.positive.is_floating_point():
        return torch.cat([family.positive[i : i + 1], x]), torch.cat([w.new_zeros(1), w]), 0
    index = i if family.positive is None else int(family.positive[i])
    return x, w, int(seen[i][:index].sum())


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, T=st.sampled_from([1e-3, 0.1, 1.0, 1e3]))
def test_it_is_what_an_empirical_measure_says(kind, seed, T):
    s = Source(seed)
    options, seen = KINDS[kind][0](s), KINDS[kind][1]
    family = gz.Likelihood(s.normal(6, 3), s.normal(6, 3), temperature=T, **options)
    v = s.normal(6, 3)
    size = 1 + float(family.candidates.abs().max() * 2 + family.chosen().abs().max() * 2)
    for i in range(6):
        x, w, place = candidates_of(i, family, seen)
        logits = x @ family.anchor[i] / T + w
        scale = 1 + float(logits.abs().max())
        G = logits.logsumexp(0)
        p = (logits - G).exp()
        mean = p @ x
        covariance = (x - mean).mT @ (p.unsqueeze(-1) * (x - mean))
        close(family.log_normalizer()[i], G, scale)
        close(family.log_probability()[i], logits[place] - G, scale)
        close(family.log_density()[i], logits[place] - w[place] - G, scale)
        close(family.mean()[i], mean, scale * size)
        close(family.gradient()[i], mean - x[place], scale * size)
        close(family.fisher()[i], covariance, scale * size**2)
        close(family.fisher_product(v)[i], covariance @ v[i], scale * size**2 * 10)
        negatives = torch.arange(len(x)) != place
        if bool(negatives.any()):
            close(family.log_odds()[i], logits[place] - logits[negatives].logsumexp(0), scale)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds)
def test_gradient_and_fisher_information_are_derivatives_of_the_loss(kind, seed):
    s = Source(seed)
    options, T = KINDS[kind][0](s), 0.5
    anchor, candidates = s.normal(6, 3), s.normal(6, 3)

    def loss(eta):
        return -gz.Likelihood(eta * T, candidates, temperature=T, **options).log_density()

    family = gz.Likelihood(anchor, candidates, temperature=T, **options)
    close(family.gradient(), torch.func.grad(lambda e: loss(e).sum())(family.eta), 100.0)
    hessian = torch.func.jacfwd(torch.func.grad(lambda e: loss(e).sum()))(family.eta)
    close(family.fisher(), torch.stack([hessian[i, :, i] for i in range(6)]), 1000.0)


@given(seed=seeds)
def test_mass_of_a_label(seed):
    s = Source(seed)
    x, w = s.normal(6, 3), s.normal(6)
    family = gz.Likelihood(x, x, exclude_self=True, positive=torch.arange(6).roll(1), log_weights=w, temperature=0.3)
    logits = (x @ x.mT / 0.3 + w).fill_diagonal_(-torch.inf)
    own = logits.masked_fill(LABELS.unsqueeze(-1) != LABELS, -torch.inf)
    expected = own.logsumexp(-1) - logits.logsumexp(-1)
    close(family.log_mass(LABELS), expected, 1 + float(logits.masked_fill(logits == -torch.inf, 0).abs().max()))


def test_the_measure_is_that_of_the_candidates():
    s = Source(0)
    family = gz.Likelihood(s.normal(4, 3), s.normal(4, 3), temperature=0.5, log_weights=s.normal(4))
    close(family.measure.log_normalizer(family.eta), family.log_normalizer(), 10.0)


@pytest.mark.parametrize("kind", ["plain", "others", "ids", "mask", "outside"])
def test_negatives_are_drawn_with_the_probabilities_of_the_family(kind):
    s = Source(1)
    options, seen = KINDS[kind][0](s), KINDS[kind][1].clone()
    family = gz.Likelihood(s.normal(6, 3), s.normal(6, 3), temperature=0.7, **options)
    if kind != "outside":
        seen[torch.arange(6), torch.arange(6) if family.positive is None else family.positive] = False
    draws = 20_000
    index = family.sample((draws,), generator=torch.Generator().manual_seed(2))
    assert index.shape == (draws, 6)
    assert family.sample().shape == (6,)
    w = 0 if family.log_weights is None else family.log_weights
    p = torch.softmax((family.anchor @ family.candidates.mT / 0.7 + w).masked_fill(~seen, -torch.inf), -1)
    counts = torch.stack([torch.bincount(index[:, i], minlength=6) for i in range(6)])
    assert bool((counts[~seen] == 0).all())
    # Pearson's statistic has at most 25 degrees of freedom: 80 is passed once in 1e8.
    alive = seen & (p > 1e-12)
    assert float(((counts - draws * p).square() / (draws * p))[alive].sum()) < 80


def test_log_n_minus_the_loss_is_below_the_mutual_information():
    """Pairs of a Gaussian with correlation r: I = -log(1 - r²)/2, reached by the true log ratio as n grows."""
    r, n = 0.8, 3000
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 1, generator=g, dtype=torch.float64)
    y = r * x + math.sqrt(1 - r**2) * torch.randn(n, 1, generator=g, dtype=torch.float64)
    # log p(y | x) = (r x y - r² y²/2 - ...)/(1 - r²) up to what depends on x alone: a family with log weights.
    anchor = torch.cat([r * x, -(r**2) * torch.ones_like(x) / 2], -1) / (1 - r**2)
    candidates = torch.cat([y, y.square()], -1)
    truth = -math.log(1 - r**2) / 2
    bound = gz.Likelihood(anchor, candidates).information_bound()
    assert truth - 0.1 < float(bound) < truth + 0.05
    # It never exceeds log n, however strong the dependence is.
    certain = gz.Likelihood(1e3 * candidates[:50, :1], candidates[:50, :1], temperature=1e-3).information_bound()
    assert float(certain) <= math.log(50) + 1e-9
    # Weights and masks: the mass of the candidates takes the place of n.
    weights = torch.full((50,), 0.25, dtype=torch.float64).log()
    weighted = gz.Likelihood(anchor[:50], candidates[:50], log_weights=weights)
    close(weighted.information_bound(), gz.Likelihood(anchor[:50], candidates[:50]).information_bound(), 100.0)
    few = torch.zeros(50, 50, dtype=torch.bool)
    masked = gz.Likelihood(anchor[:50], candidates[:50], mask=few)
    close(masked.information_bound(), torch.zeros((), dtype=torch.float64), 100.0)
