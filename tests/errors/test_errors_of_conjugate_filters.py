"""Conjugate and attention filters say what is wrong with a family, a motion, a prior, a count or a slot."""

import torch

from gradlogz import AttentionFilter, ConjugateFilter, Gaussian, Prior, Series, SwitchingModel
from gradlogz.filters import (
    BetaBinomial,
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
    attentive_imm,
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
flowing = SwitchingModel(transition=Generator(number([[-1.0, 1.0], [1.0, -1.0]])), **fields)


def built(family=counts, dynamics=(Discount(0.9), Reset(prior)), transition=T, **options):
    return lambda: ConjugateFilter(family, transition=transition, dynamics=dynamics, **options)


def filtered(y=y, prior=prior, **options):
    return lambda: good.filter(y, prior=prior, **options)


ERRORS = [
    (
        ValueError,
        "ConjugateFilter: family must be one for all modes or have k=2; got 3.",
        built(family=GammaPoisson(torch.ones(3, dtype=F64))),
    ),
    (
        ValueError,
        "AttentionFilter.step: noise must be (2, 2), as what is sent on; got shape (3, 3).",
        lambda: AttentionFilter(message="covariance", noise=torch.eye(3, dtype=F64)).step(Slots(points), points),
    ),
    (
        ValueError,
        "ConjugateFilter: discount must be one number; got shape (2,).",
        built(dynamics=(Discount(number([0.9, 0.8])), Reset(prior))),
    ),
    (
        ValueError,
        "ConjugateFilter.init: the prior of Reset must be [p=2] or [*b, p] with targets (3,); got shape (2, 2).",
        lambda: ConjugateFilter(counts, transition=T, dynamics=[Discount(0.9), Reset(prior.expand(2, 2))]).init(
            prior=prior, batch_shape=(3,)
        ),
    ),
    (ValueError, "GammaPoisson: channels must be at least 1; got 0.", lambda: GammaPoisson(channels=0)),
    (
        ValueError,
        "GammaPoisson: exposure must be a number, [k] or [k, o=1]; got shape (2, 3).",
        lambda: GammaPoisson(torch.ones(2, 3)),
    ),
    (
        ValueError,
        "GammaPoisson: exposure must be at least 0; got 1 of 2 below 0.",
        lambda: GammaPoisson(number([1.0, -1.0])),
    ),
    (
        ValueError,
        "GammaPoisson.prior: shape must be positive; got 1 of 1 entries at or below 0.",
        lambda: counts.prior(number(0.0), one),
    ),
    (
        ValueError,
        "GammaPoisson.prior: shape and rate must be [*b] or [*b, o=2]; got shapes (3,) and (2, 2).",
        lambda: GammaPoisson(channels=2).prior(torch.ones(3, dtype=F64), torch.ones(2, 2, dtype=F64)),
    ),
    (ValueError, "GammaExponential: channels must be at least 1; got -1.", lambda: GammaExponential(channels=-1)),
    (ValueError, "BetaBinomial: trials must be at least 1; got 0.", lambda: BetaBinomial(0)),
    (
        ValueError,
        "DirichletMultinomial: categories must be at least 2; got 1.",
        lambda: DirichletMultinomial(1),
    ),
    (
        ValueError,
        "DirichletMultinomial.prior: concentration must end in c=3; got shape (2,).",
        lambda: shares.prior(torch.ones(2, dtype=F64)),
    ),
    (ValueError, "InverseWishartNormal: dimension must be at least 1; got 0.", lambda: InverseWishartNormal(0)),
    (
        ValueError,
        "InverseWishartNormal.prior: scale must be [*b, 2, 2] and df [*b]; got shapes () and (3, 3).",
        lambda: InverseWishartNormal(2).prior(one, torch.eye(3, dtype=F64)),
    ),
    (
        ValueError,
        "InverseWishartNormal.prior: df must exceed p-1=1 and scale be positive definite; got a law of infinite mass.",
        lambda: InverseWishartNormal(2).prior(one, eye),
    ),
    (
        ValueError,
        "LinearGaussian: H must be [o, s] or [k, o, s], R [o, o], d [o]; got shapes (2, 2) and (1, 1).",
        lambda: LinearGaussian(eye, eye[:1, :1]),
    ),
    (
        ValueError,
        "LinearGaussian: R must be positive definite; got one that is not.",
        lambda: LinearGaussian(eye, -eye),
    ),
    (
        ValueError,
        "LinearGaussian.prior: mean must end in s=2, covariance in s, s; got shapes (3,) and (2, 2).",
        lambda: LinearGaussian(eye, eye).prior(torch.ones(3, dtype=F64), eye),
    ),
    (
        ValueError,
        "LinearGaussian.prior: covariance must be positive definite; got one that is not.",
        lambda: LinearGaussian(eye, eye).prior(torch.ones(2, dtype=F64), 0 * eye),
    ),
    (
        ValueError,
        "is_closed_under: matrix must be [1, 1], offset [1] and noise [1, 1]; got shapes (2, 2).",
        lambda: is_closed_under(counts, LinearMotion(eye)),
    ),
    (
        ValueError,
        "ConjugateFilter: discount must be above 0 and at most 1; got 1.5.",
        built(dynamics=[Discount(1.5), Reset(prior)]),
    ),
    (
        ValueError,
        "ConjugateFilter: the prior of Reset must end in p=2 natural parameters; got shape (3,).",
        built(dynamics=[Discount(0.5), Reset(torch.ones(3, dtype=F64))]),
    ),
    (
        ValueError,
        "ConjugateFilter: the prior of Discount must have a finite mass; got one outside the domain.",
        built(dynamics=[Discount(0.5, -prior), Reset(prior)]),
    ),
    (
        ValueError,
        "ConjugateFilter: LinearMotion must keep the family GammaPoisson; got one that does not: Gamma laws keep their "
        "family under positive scaling of each channel alone.",
        built(dynamics=[Discount(0.5), LinearMotion(number([[-1.0]]))]),
    ),
    (
        ValueError,
        "ConjugateFilter: transition must be [1, 1], as there are dynamics; got shape (2, 2).",
        built(dynamics=[Discount(0.5)]),
    ),
    (
        ValueError,
        'ConjugateFilter: method must be "imm" or "gpb" and depth at least 1; got \'gpb\' and 0.',
        built(depth=0),
    ),
    (
        ValueError,
        "ConjugateFilter: transition must be probabilities; got 1 below 0.",
        built(transition=number([[1.1, -0.1], [0.5, 0.5]])),
    ),
    (ValueError, "ConjugateFilter: rows of transition must sum to one; got a log sum of", built(transition=2 * T)),
    (
        ValueError,
        "ConjugateFilter.filter: observations must be [*b, t, o=1]; got shape (4, 2).",
        filtered(torch.zeros(4, 2, dtype=F64)),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: series must have observations, mask and lengths alone; got inputs or times.",
        filtered(Series(y, times=torch.arange(len(y), dtype=F64))),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: observations of GammaPoisson must be whole numbers from 0, or NaN; got -2 at (2, 0), "
        "and 1 in all.",
        filtered(number([[0.0], [1.0], [-2.0]])),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: an observation of DirichletMultinomial must be seen whole or not at all; got one with "
        "a gap, number 1.",
        lambda: votes.filter(number([[1.0, 0, 2], [1, torch.nan, 0]]), prior=torch.ones(3, dtype=F64)),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: prior must be [p=2], [k=2, p] or [*b, k, p] with targets (); got shape (3, 2).",
        filtered(prior=prior.expand(3, 2)),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: prior must have a finite mass; got one outside the domain.",
        filtered(prior=-prior),
    ),
    (
        ValueError,
        "ConjugateFilter.filter: log_mode_probability must be [k=2] or [*b, k] with targets (); got shape (3,).",
        filtered(log_mode_probability=torch.zeros(3, dtype=F64)),
    ),
    (
        ValueError,
        "ConjugateFilter.step: observation must have the targets (3,) of the state; got shape (2, 1).",
        lambda: good.step(good.init(prior=prior, batch_shape=(3,)), torch.zeros(2, 1, dtype=F64)),
    ),
    (
        ValueError,
        "AttentionFilter: message must be one of mean, covariance; got 'all'.",
        lambda: AttentionFilter(message="all"),
    ),
    (
        ValueError,
        'AttentionFilter: noise must come with covariances; got message="mean".',
        lambda: AttentionFilter(noise=eye),
    ),
    (
        ValueError,
        'AttentionFilter: sinkhorn must have coupling="mean"; got coupling="state".',
        lambda: AttentionFilter(weights="sinkhorn", coupling="state"),
    ),
    (
        ValueError,
        "AttentionFilter: Sinkhorn's method must settle within 1 iterations; got marginals that are off by",
        lambda: AttentionFilter(weights="sinkhorn", max_iterations=1).step(Slots(points), points),
    ),
    (
        ValueError,
        "AttentionFilter.step: slots.mean must be [*b, n, d] and eta [*b, m, d], of one slot or more; "
        "got shapes (3, 2) and (3, 1).",
        lambda: AttentionFilter().step(Slots(points), points[:, :1]),
    ),
    (
        ValueError,
        "AttentionFilter.step: value must be [d=2, e]; got shape (3, 3).",
        lambda: AttentionFilter(value=torch.eye(3, dtype=F64)).step(Slots(points), points),
    ),
    (
        ValueError,
        "AttentionFilter.dropped: slots.covariance must be (3, 2, 2); got shape (2, 2).",
        lambda: AttentionFilter().dropped(Slots(points, eye), points),
    ),
    (
        ValueError,
        "AttentionFilter.chain: slots.log_probability must be (3,); got shape (2,).",
        lambda: AttentionFilter().chain(Slots(points, None, one.expand(2)), points),
    ),
    (
        ValueError,
        "attentive_imm: the model must have a transition matrix; got a Generator.",
        lambda: attentive_imm(flowing, y, Prior(points[0], eye), eta=eye),
    ),
    (
        ValueError,
        "attentive_imm: eta must be [k=2, s=2], one for each mode; got shape (3, 2).",
        lambda: attentive_imm(switching, y, Prior(points[0], eye), eta=points),
    ),
    (
        ValueError,
        "attentive_imm: observations must be [*b, t, o=1]; got shape (4, 2).",
        lambda: attentive_imm(switching, torch.zeros(4, 2, dtype=F64), Prior(points[0], eye), eta=eye),
    ),
    (
        ValueError,
        "linear_link: eta must be [m, d=2] with more than d + 1 rows; got shape (3, 2).",
        lambda: linear_link(Gaussian(points[0], eye), points),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
