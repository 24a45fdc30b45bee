"""Statistics of the metric experiment are those of the probe; its heads reach closed forms; its decisions can fail."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from experiments.intervals import mean_of, student
from experiments.metric import alignment, experiment
from experiments.metric.estimation import FAMILIES, Distributions, Heads
from gradlogz.probing.predictions import qk_geometry


def matrices(d=5):
    U, V, A = torch.randn(3, 4, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return U, V, A @ A.mT


def test_alignments_are_those_of_the_probe():
    U, V, T = matrices()
    B = U @ V.mT
    assert torch.allclose(alignment.cosine(B, T), qk_geometry._cosine(alignment.symmetric(B), T), atol=1e-12)
    assert torch.allclose(alignment.positive_cosine(B), qk_geometry._alone(qk_geometry._gram(U, V))[0], atol=1e-8)
    sizes = (qk_geometry._sizes(X) for X in (alignment.symmetric(B), T))
    expected = torch.tensor(qk_geometry._turned(*sizes, 5), dtype=torch.float64)
    assert torch.allclose(torch.stack(alignment.rotation_null(B, T), -1), expected, atol=1e-12)


def test_the_rotation_null_is_that_of_sampled_rotations():
    U, V, T = (X[0] for X in matrices())
    B = U @ V.mT
    rotations = torch.linalg.qr(torch.randn(20000, 5, 5, dtype=torch.float64))[0]
    cosines = alignment.cosine(rotations @ alignment.symmetric(B) @ rotations.mT, T.expand(20000, 5, 5))
    null = alignment.rotation_null(B[None], T[None])
    assert abs(cosines.mean() - null.mean) < 5 * null.deviation / 20000**0.5
    assert abs(cosines.std() / null.deviation - 1) < 0.05


def test_alignments_do_not_change_with_the_basis_of_queries_and_keys():
    U, V, T = matrices()
    M = torch.randn(5, 5, dtype=torch.float64)
    moved = (U @ M) @ (V @ torch.linalg.inv(M).mT).mT
    assert torch.allclose(alignment.cosine(moved, T), alignment.cosine(U @ V.mT, T), atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_bayes_is_the_posterior_mean_by_densities_of_scipy(family):
    distributions = Distributions.drawn(family, [3], d=4)
    prompts = distributions.prompts(0, prompts=2, symbols=6, queries=3)
    estimates = distributions.bayes(prompts)
    R = distributions.noise[0].numpy()
    for b in range(2):
        theta = prompts.symbols[0, b].numpy()
        for m in range(3):
            x = prompts.queries[0, b, m].numpy()
            if family == "gaussian":
                p = [stats.multivariate_normal.pdf(x, t, R) for t in theta]
            else:
                kind = stats.bernoulli if family == "bernoulli" else stats.poisson
                p = [kind.pmf(x, t).prod() for t in theta]
            p = torch.tensor(p, dtype=torch.float64) / sum(p)
            assert torch.allclose(estimates[0, b, m].double(), p @ torch.tensor(theta).double(), atol=1e-5)


def test_equal_numbers_are_equal_distributions():
    first, second, other = Distributions.drawn("gaussian", [1, 1, 2], d=4).noise
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)


def test_the_fisher_information_is_the_hessian_of_the_log_normaliser():
    distributions = Distributions.drawn("gaussian", [0], d=3)
    heads = Heads("dot product, identity", distributions, [0])
    prompts = distributions.prompts(0, prompts=1, symbols=7, queries=1)
    theta = prompts.symbols[0, 0].double()
    eta = (prompts.queries @ heads.query @ heads.key.mT)[0, 0, 0].detach().double()
    hessian = torch.func.hessian(lambda e: (theta @ e).logsumexp(0))(eta)
    assert torch.allclose(heads.fisher_information(prompts)[0], hessian, atol=1e-5)


def test_a_short_training_finds_the_precision():
    settings = replace(experiment.REDUCED, seeds={4: 1}, distributions=2, lengths=(16,))
    both = experiment.trained_cell("gaussian", "exact", 4, settings)
    assert min(both[experiment.PRECISION]["cosine"]) > 0.99
    assert max(both[experiment.COVARIANCE]["cosine"]) < 0.9
    assert max(both["excess risk"]["16"]) < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_heads_of_every_family_are_measured(family):
    heads = Heads("metric", Distributions.drawn(family, [0, 1], d=4), [0, 1])
    values = experiment.measured(heads, replace(experiment.REDUCED, lengths=(16,)))
    for name in experiment.TARGETS:
        assert all(abs(value) <= 1 for value in values[name]["cosine"])
    assert min(values["excess risk"]["16"]) > 0.1


def test_inverse_covariances_of_counts_are_those_of_the_log_normal_prior():
    distributions = Distributions.drawn("poisson", [0], d=4)
    targets = experiment.targets(distributions, torch.zeros(1, 4, 4))
    m, s = distributions.centre[0].double(), 0.5
    mean, variance = m * math.exp(s**2 / 2), m**2 * math.exp(s**2) * math.expm1(s**2)
    assert torch.allclose(1 / targets[experiment.KEYS][0].diagonal(), variance, rtol=0.2)
    assert torch.allclose(1 / targets[experiment.QUERIES][0].diagonal(), mean + variance, rtol=0.2)


def cell(family, head, values, risk=0.0):
    """A cell of three distributions with chosen cosines."""
    columns = {"null": [0.5] * 3, "null deviation": [0.05] * 3, "traceless cosine": [0.0] * 3}
    targets = {name: {"cosine": [values.get(name, 0.1) + e for e in (-0.01, 0, 0.01)], **columns}
               for name in experiment.TARGETS}  # fmt: skip
    risks = {"64": [risk + e for e in (-0.001, 0, 0.001)]}
    return {"family": family, "head": head, "d": 8, "distribution": [0, 1, 2], "excess risk": risks, **targets}


def decided(precision, control=0.999):
    cells = []
    for family in FAMILIES:
        for head in experiment.HEADS:
            values = {experiment.PRECISION: precision, experiment.QUERIES: 0.8, experiment.FISHER: 0.3}
            if head == "exact":
                values = {experiment.PRECISION: control}
            cells.append(cell(family, head, values, risk=0.05 if family == "poisson" else 0.001))
    return experiment.decisions(cells)["d = 8"]


def test_decisions_follow_the_plan():
    assert decided(0.96)["H1 metric head"]["verdict"] == "supported"
    assert decided(0.6)["H1 metric head"]["verdict"] == "refuted"
    assert decided(0.89)["H1 metric head"]["verdict"] == "inconclusive"
    assert decided(0.96)["H3 inverse covariance of the queries"]["verdict"] == "refuted"
    assert decided(0.6)["H3 inverse covariance of the queries"]["verdict"] == "supported"
    assert decided(0.96)["H4 gap, poisson"]["verdict"] == "supported"
    assert decided(0.96)["H4 gap, bernoulli"]["verdict"] == "inconclusive"
    assert decided(0.2)["H5 attended Fisher, gaussian, metric"]["verdict"] == "supported"
    assert decided(0.96, control=0.9)["H1 metric head"]["verdict"] == "not judged"


def test_intervals_are_those_of_scipy():
    values = [1.0, 2.5, 2.0, 4.0]
    interval = student(values)
    low, high = stats.t.interval(0.95, 3, loc=interval.mean, scale=stats.sem(values))
    assert interval.low == pytest.approx(low)
    assert interval.high == pytest.approx(high)
    others = [0.5, 0.7, 0.1]
    welch = stats.ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
    difference = interval.minus(student(others))
    assert (difference.low, difference.high) == pytest.approx((welch.low, welch.high))


def test_a_mean_of_means_is_that_of_equal_weights():
    groups = [[1.0, 2.5, 2.0, 4.0], [0.5, 0.7, 0.1]]
    combined = mean_of([student(values) for values in groups])
    errors = [stats.sem(values) / 2 for values in groups]
    freedom = sum(e**2 for e in errors) ** 2 / sum(e**4 / (len(v) - 1) for e, v in zip(errors, groups, strict=True))
    mean = sum(sum(v) / len(v) for v in groups) / 2
    low, high = stats.t.interval(0.95, freedom, loc=mean, scale=sum(e**2 for e in errors) ** 0.5)
    assert (combined.mean, combined.low, combined.high) == pytest.approx((mean, low, high))
