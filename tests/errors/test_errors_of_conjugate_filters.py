"""Conjugate and attention filters say what is wrong with a family, a motion, a prior, a count or a slot."""

import torch

from gradlogz import AttentionFilter, ConjugateFilter, Gaussian, Prior, Series, SwitchingModel
from gradlogz.filters import (
    BetaBinomial,
    ConjugateWeights,
    DirichletMultinomial,
    Discount,
    GammaExponential,
    GammaPoisson,
    Generator,
    InverseWishartNormal,
    LinearGaussian,
    LinearMotion,
    Reset,
    Slots,
    attended_model,
    attentive_gpb1,
    attentive_gpb2,
    attentive_imm,
    fit_eta,
    is_closed_under,
    linear_link,
)
from support.error_form import each_of, refused

F64 = torch.float64


def number(x):
    return torch.tensor(x, dtype=F64)


eye, one = torch.eye(2, dtype=F64), number(1.0)
T = number([[0.9, 0.1], [0.4, 0.6]])
counts, shares = GammaPoisson(), DirichletMultinomial(3)
prior = counts.prior(one, one)
good = ConjugateFilter(counts, transition=T, dynamics=[Discount(0.9), Reset(prior)])
votes = ConjugateFilter(shares, transition=torch.ones(1, 1, dtype=F64), dynamics=[Discount(0.9)])
y = torch.zeros(4, 1, dtype=F64)
points = number([[1.0, 0.0], [0.0, 3.0], [-1.0, 1.0]])
fields = {
    "F": eye.expand(2, 2, 2),
    "Q": eye.expand(2, 2, 2),
    "H": torch.ones(2, 1, 2, dtype=F64),
    "R": torch.ones(2, 1, 1, dtype=F64),
}
switching = SwitchingModel(transition=T, **fields)
conjugate = ConjugateWeights(Gaussian(points[0], eye), points)
flowing = SwitchingModel(transition=Generator(number([[-1.0, 1.0], [1.0, -1.0]])), **fields)


def built(family=counts, dynamics=(Discount(0.9), Reset(prior)), transition=T, **options):
    return lambda: ConjugateFilter(family, transition=transition, dynamics=dynamics, **options)


def filtered(y=y, prior=prior, **options):
    return lambda: good.filter(y, prior=prior, **options)


ERRORS = [
    (
        ValueError,
        "ConjugateFilter: family",
        "modes",
        built(family=GammaPoisson(torch.ones(3, dtype=F64))),
    ),
    (
        ValueError,
        "AttentionFilter.step: noise",
        "values",
        lambda: AttentionFilter(message="covariance", noise=torch.eye(3, dtype=F64)).step(Slots(points), points),
    ),
    (
        ValueError,
        "ConjugateFilter: discount",
        "one number",
        built(dynamics=(Discount(number([0.9, 0.8])), Reset(prior))),
    ),
    (
        ValueError,
        "ConjugateFilter.init: prior",
        "targets",
        lambda: ConjugateFilter(counts, transition=T, dynamics=[Discount(0.9), Reset(prior.expand(2, 2))]).init(
            prior=prior, batch_shape=(3,)
        ),
    ),
    (ValueError, "GammaPoisson: channels", "least", lambda: GammaPoisson(channels=0)),
    (
        ValueError,
        "GammaPoisson: exposure",
        "number",
        lambda: GammaPoisson(torch.ones(2, 3)),
    ),
    (
        ValueError,
        "GammaPoisson: exposure",
        "least",
        lambda: GammaPoisson(number([1.0, -1.0])),
    ),
    (
        ValueError,
        "GammaPoisson.prior: shape",
        "positive",
        lambda: counts.prior(number(0.0), one),
    ),
    (
        ValueError,
        "GammaPoisson.prior: shape and rate",
        "or",
        lambda: GammaPoisson(channels=2).prior(torch.ones(3, dtype=F64), torch.ones(2, 2, dtype=F64)),
    ),
    (ValueError, "GammaExponential: channels", "least", lambda: GammaExponential(channels=-1)),
    (ValueError, "BetaBinomial: trials", "least", lambda: BetaBinomial(0)),
    (
        ValueError,
        "DirichletMultinomial: categories",
        "least",
        lambda: DirichletMultinomial(1),
    ),
    (
        ValueError,
        "DirichletMultinomial.prior: concentration",
        "end",
        lambda: shares.prior(torch.ones(2, dtype=F64)),
    ),
    (ValueError, "InverseWishartNormal: dimension", "least", lambda: InverseWishartNormal(0)),
    (
        ValueError,
        "InverseWishartNormal.prior: scale",
        "and",
        lambda: InverseWishartNormal(2).prior(one, torch.eye(3, dtype=F64)),
    ),
    (
        ValueError,
        "InverseWishartNormal.prior: df",
        "positive",
        lambda: InverseWishartNormal(2).prior(one, eye),
    ),
    (
        ValueError,
        "LinearGaussian: H",
        "or",
        lambda: LinearGaussian(eye, eye[:1, :1]),
    ),
    (
        ValueError,
        "LinearGaussian: R",
        "positive definite",
        lambda: LinearGaussian(eye, -eye),
    ),
    (
        ValueError,
        "LinearGaussian.prior: mean",
        "covariance",
        lambda: LinearGaussian(eye, eye).prior(torch.ones(3, dtype=F64), eye),
    ),
    (
        ValueError,
        "LinearGaussian.prior: covariance",
        "positive definite",
        lambda: LinearGaussian(eye, eye).prior(torch.ones(2, dtype=F64), 0 * eye),
    ),
    (
        ValueError,
        "is_closed_under: matrix",
        "offset",
        lambda: is_closed_under(counts, LinearMotion(eye)),
    ),
    (
        ValueError,
        "ConjugateFilter: discount",
        "above",
        built(dynamics=[Discount(1.5), Reset(prior)]),
    ),
    (
        ValueError,
        "ConjugateFilter: prior",
        "parameters",
        built(dynamics=[Discount(0.5), Reset(torch.ones(3, dtype=F64))]),
    ),
    (
        ValueError,
        "ConjugateFilter: prior",
        "normalisable",
        built(dynamics=[Discount(0.5, -prior), Reset(prior)]),
    ),
    (
        ValueError,
        "ConjugateFilter: LinearMotion",
        "GammaPoisson",
        built(dynamics=[Discount(0.5), LinearMotion(number([[-1.0]]))]),
    ),
    (
        ValueError,
        "ConjugateFilter: transition",
        "dynamics",
        built(dynamics=[Discount(0.5)]),
    ),
    (
        ValueError,
        "ConjugateFilter: method",
        "depth",
        built(depth=0),
    ),
    (
        ValueError,
        "ConjugateFilter: transition",
        "probabilities",
        built(transition=number([[1.1, -0.1], [0.5, 0.5]])),
    ),
    (ValueError, "ConjugateFilter: rows of transition", "sum", built(transition=2 * T)),
    (
        ValueError,
        "ConjugateFilter.filter: observations",
        "[*b,",
        filtered(torch.zeros(4, 2, dtype=F64)),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: series",
        "observations",
        filtered(Series(y, times=torch.arange(len(y), dtype=F64))),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: observations",
        "integers",
        filtered(number([[0.0], [1.0], [-2.0]])),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: observations",
        "whole",
        lambda: votes.filter(number([[1.0, 0, 2], [1, torch.nan, 0]]), prior=torch.ones(3, dtype=F64)),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: prior",
        "targets",
        filtered(prior=prior.expand(3, 2)),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: prior",
        "normalisable",
        filtered(prior=-prior),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: log_mode_probability",
        "targets",
        filtered(log_mode_probability=torch.zeros(3, dtype=F64)),
    ),
    (
        ValueError,
        "ConjugateFilter.step: observation",
        "targets",
        lambda: good.step(good.init(prior=prior, batch_shape=(3,)), torch.zeros(2, 1, dtype=F64)),
    ),
    (
        ValueError,
        "AttentionFilter: message",
        "covariance",
        lambda: AttentionFilter(message="all"),
    ),
    (
        ValueError,
        "AttentionFilter: noise",
        "covariances",
        lambda: AttentionFilter(noise=eye),
    ),
    (
        ValueError,
        "AttentionFilter: sinkhorn",
        "coupling",
        lambda: AttentionFilter(weights="sinkhorn", coupling="state"),
    ),
    (
        ValueError,
        "AttentionFilter: max_iterations",
        "iterations",
        lambda: AttentionFilter(weights="sinkhorn", max_iterations=1).step(Slots(points), points),
    ),
    (
        ValueError,
        "AttentionFilter.step: slots.mean",
        "slot",
        lambda: AttentionFilter().step(Slots(points), points[:, :1]),
    ),
    (
        ValueError,
        "AttentionFilter.step: value",
        "[d=2, e]",
        lambda: AttentionFilter(value=torch.eye(3, dtype=F64)).step(Slots(points), points),
    ),
    (
        ValueError,
        "AttentionFilter.step: value",
        "[m=3, d=2, e]",
        lambda: AttentionFilter(value=torch.ones(2, 2, 2, dtype=F64)).step(Slots(points), points),
    ),
    (
        ValueError,
        "AttentionFilter.dropped: slots.covariance",
        "(3,",
        lambda: AttentionFilter().dropped(Slots(points, eye), points),
    ),
    (
        ValueError,
        "AttentionFilter.chain: slots.log_probability",
        "(3,)",
        lambda: AttentionFilter().chain(Slots(points, None, one.expand(2)), points),
    ),
    (
        ValueError,
        "attentive_imm: model",
        "transition",
        lambda: attentive_imm(flowing, y, Prior(points[0], eye), eta=eye),
    ),
    (
        ValueError,
        "attentive_imm: eta",
        "mode",
        lambda: attentive_imm(switching, y, Prior(points[0], eye), eta=points),
    ),
    (
        ValueError,
        "attentive_imm: observations",
        "[*b,",
        lambda: attentive_imm(switching, torch.zeros(4, 2, dtype=F64), Prior(points[0], eye), eta=eye),
    ),
    (
        ValueError,
        "attentive_gpb1: eta",
        "mode",
        lambda: attentive_gpb1(switching, y, Prior(points[0], eye), eta=points),
    ),
    (
        ValueError,
        "attentive_gpb2: model",
        "transition",
        lambda: attentive_gpb2(flowing, y, Prior(points[0], eye), eta=eye),
    ),
    (
        ValueError,
        "attended_model: method",
        "gpb2",
        lambda: attended_model(switching, y, Prior(points[0], eye), eta=eye, method="kim"),
    ),
    (
        ValueError,
        "fit_eta: method",
        "gpb2",
        lambda: fit_eta(switching, y, Prior(points[0], eye), method="kim"),
    ),
    (
        ValueError,
        "fit_eta: method",
        "max_iterations",
        lambda: fit_eta(switching, y, Prior(points[0], eye), max_iterations=0),
    ),
    (
        ValueError,
        "ConjugateWeights: eta",
        "[n, d=2]",
        lambda: ConjugateWeights(Gaussian(points[0], eye), points[0]),
    ),
    (
        ValueError,
        "ConjugateWeights: eta",
        "batch",
        lambda: ConjugateWeights(Gaussian(points, eye.expand(3, 2, 2)), points),
    ),
    (
        ValueError,
        "ConjugateWeights: log_prior",
        "[3]",
        lambda: ConjugateWeights(Gaussian(points[0], eye), points, log_prior=points[0]),
    ),
    (
        ValueError,
        "ConjugateWeights.update: xi",
        "[*b, d=2]",
        lambda: conjugate.update(points[:, :1], 1.0),
    ),
    (
        ValueError,
        "ConjugateWeights.update: xi",
        "nu",
        lambda: conjugate.update(points[0], number([1.0, 2.0])),
    ),
    (
        ValueError,
        "ConjugateWeights.attend: value",
        "[n=3, v]",
        lambda: conjugate.attend(points, value=eye),
    ),
    (
        ValueError,
        "linear_link: eta",
        "rows",
        lambda: linear_link(Gaussian(points[0], eye), points),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
