"""Intervals of 95 % hold the truth in about 95 of 100 corpora, drawn here by the thousand.

Documents are the unit: tokens of one are alike. The allowed error of 2 points is what 200 replicates leave (their
quantiles are known to a tenth of an arm, and corpora of one simulation share them) beside the binomial error, 0.4.
"""

import functools

import pytest
import torch

from gradlogz.probing.statistics import (
    GROUPS,
    Comoments,
    affine_fit,
    bootstrap,
    comoments_of,
    correlation,
    jackknife,
    mean,
    median_estimate,
    merge,
    moment_columns,
    sums_of,
)

CORPORA, HEADS = 30, 100


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def keys_of(generator, count):
    return torch.randint(2**62, (count,), generator=generator)


def means(generator, count):
    """Documents of 5 to 50 tokens, the mean of each normal around 0, with half of the variance between documents."""
    lengths = torch.randint(5, 51, (count, 1), generator=generator).double()
    of_tokens = normal(generator, count, HEADS) * lengths.rsqrt()
    values = lengths * (normal(generator, count, HEADS) + of_tokens)
    return bootstrap(mean, sums_of(torch.stack((lengths.expand_as(values), values), -1), keys_of(generator, count)))


def correlations(generator, count):
    """Pairs of tokens whose correlation is 0.6, one for each document."""
    x, noise = normal(generator, count, HEADS, 1), normal(generator, count, HEADS, 1)
    return bootstrap(correlation, sums_of(moment_columns(x, 0.6 * x + 0.8 * noise), keys_of(generator, count)))


@pytest.mark.parametrize("count", [8, 20, 80])
@pytest.mark.parametrize(("simulate", "truth"), [(means, 0.0), (correlations, 0.6)])
def test_the_bootstrap_over_documents_covers(simulate, truth, count):
    generator = torch.Generator().manual_seed(count)
    found = [simulate(generator, count) for _ in range(CORPORA)]
    covered = torch.stack([(e.low <= truth) & (truth <= e.high) for e in found])
    assert float(covered.double().mean()) == pytest.approx(0.95, abs=0.02)


def test_tokens_are_no_documents():
    """If tokens were weighted one by one, as if they were independent, the interval would be far too short."""
    generator = torch.Generator().manual_seed(0)
    of_documents = normal(generator, 40, HEADS)
    tokens = (of_documents.unsqueeze(1) + 0.1 * normal(generator, 40, 25, HEADS)).flatten(0, 1)
    values = torch.stack((torch.ones_like(tokens), tokens), -1)
    right = bootstrap(mean, sums_of(values, keys_of(generator, 40).repeat_interleave(25)))
    wrong = bootstrap(mean, sums_of(values, keys_of(generator, 1000)))
    covered = [float(((e.low <= 0) & (0 <= e.high)).double().mean()) for e in (right, wrong)]
    assert covered[0] > 0.85
    assert covered[1] < 0.5


def grouped(x: torch.Tensor, y: torch.Tensor | None, groups: list[int]) -> Comoments:
    """Comoments of documents [h, document, t, p], document i in groups[i]."""
    parts = []
    for g in range(GROUPS):
        inside = [i for i, group in enumerate(groups) if group == g]
        if inside:
            other = None if y is None else y[:, inside].flatten(1, 2)
            parts.append(comoments_of(x[:, inside].flatten(1, 2), other, group=g))
    return functools.reduce(merge, parts)


def drawn_groups(generator, documents):
    return torch.randint(GROUPS, (documents,), generator=generator).tolist()


def variances(generator):
    """Sixty documents of ten tokens in groups of unequal sizes; log trace of the covariance, which is that of 3."""
    x = normal(generator, 50, 60, 1, 3) * 0.5**0.5 + normal(generator, 50, 60, 10, 3) * 0.5**0.5
    groups = drawn_groups(generator, 60)
    return jackknife(lambda m: (m.divided(m.xx.diagonal(dim1=-2, dim2=-1)).sum(-1)).log(), grouped(x, None, groups))


def scores(generator):
    """Two hundred documents of ten tokens, half of whose variance is linear in x."""
    x = normal(generator, 50, 200, 10, 3)
    y = x.sum(-1, keepdim=True) + 3**0.5 * normal(generator, 50, 200, 10, 1)
    return affine_fit(grouped(x, y, drawn_groups(generator, 200))).held_out


@pytest.mark.parametrize(("simulate", "truth"), [(variances, torch.tensor(3.0).double().log()), (scores, 0.5)])
def test_the_jackknife_over_groups_covers(simulate, truth):
    generator = torch.Generator().manual_seed(3)
    found = [simulate(generator) for _ in range(40)]
    covered = torch.stack([(e.low <= truth) & (truth <= e.high) for e in found]).double().mean()
    assert float(covered) == pytest.approx(0.95, abs=0.02)


def of_median(estimate):
    """The interval of the median over heads, from the replicates of an estimate of all heads."""
    return median_estimate(estimate.value, estimate.replicates, estimate.freedom.min())


@pytest.mark.parametrize("apart", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["bootstrap", "jackknife"])
def test_the_interval_of_a_median_over_heads_covers(kind, apart):
    """Nine heads that read the same documents, whose values are equal or apart; the true median is 0."""
    generator = torch.Generator().manual_seed(int(apart))
    truth, documents, corpora, covered = apart * torch.arange(-4, 5).double(), 40, 600, 0
    for _ in range(corpora):
        shared = normal(generator, documents, 1)
        values = truth + shared + normal(generator, documents, 9)
        if kind == "bootstrap":
            columns = torch.stack((torch.ones_like(values), values), -1)
            found = of_median(bootstrap(mean, sums_of(columns, keys_of(generator, documents))))
        else:
            state = None
            for group, part in enumerate(values.split(documents // GROUPS)):
                state = merge(state, comoments_of(part.mT.unsqueeze(-1), group=group))
            found = of_median(jackknife(lambda m: m.mean_x.squeeze(-1), state))
        covered += bool(found.low <= 0 <= found.high)
    assert covered / corpora == pytest.approx(0.95, abs=0.03)
