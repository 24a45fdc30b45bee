"""Break any formula on purpose and a statement fails: `gradlogz verify` then exits with 1.

Each formula of the package is broken in turn: its result changes sign, or, where it returns several things, the first
of them does.
"""

import functools

import pytest
import torch
from torch import Tensor

import gradlogz as gz
from gradlogz import attention, measures
from gradlogz.measures import algebra
from gradlogz.measures.measure import Measure
from gradlogz.verification.program import verify

STATISTICS = ["log_normalizer", "mean", "covariance", "covariance_product"]
CONCRETE = [gz.Empirical, gz.Gaussian, gz.Mixture, gz.Sphere, gz.OneHot, gz.Wishart]
COMPOSED = [algebra.Tilted, algebra.Convolution, algebra.Sum, algebra.Product, algebra.Pushforward, algebra.Reweighted]
ELEMENTWISE = [gz.Gamma, gz.InverseGaussian, gz.Poisson, gz.Spins]

METHODS = [
    *((c, name) for c in CONCRETE + COMPOSED for name in STATISTICS),
    *((c, name) for c in ELEMENTWISE for name in ("_g", "_g1", "_g2")),
    *((c, name) for c in (gz.Statistic, gz.ConjugatePrior) for name in ("log_normalizer",)),
    *((gz.measures.Differentiated, name) for name in ("mean", "covariance", "covariance_product")),
    *((gz.measures.Separable, name) for name in STATISTICS),
    *((gz.Empirical, name) for name in ("entropy", "probabilities", "support")),
    *((gz.Mixture, name) for name in ("responsibilities", "lower_bound")),
    *((gz.ConjugatePrior, name) for name in ("base_log_normalizer",)),
    *(
        (Measure, name)
        for name in ("third_cumulant", "relative_entropy", "kl", "log_density", "natural_gradient", "expect")
    ),
]
FUNCTIONS = ["bregman", "dual", "mean_to_natural", "moment_project", "merge", "svec", "smat"]


def flipped(formula):
    def broken(*arguments, **options):
        result = formula(*arguments, **options)
        return -result if isinstance(result, Tensor) else type(result)(-result[0], *result[1:])

    return broken


@pytest.fixture(scope="module", autouse=True)
def _timed():
    """Time the statements before anything is broken."""
    cheapest_first()


@functools.cache
def cheapest_first():
    """All statements by their time, so that a broken formula is noticed before solvers iterate on it."""
    return [result.statement for result in sorted(verify(), key=lambda result: result.seconds)]


NOTICED = {}  # statements that failed, by the class of what was broken: they are tried first when it breaks again


def some_statement_fails(owner=None) -> bool:
    first = NOTICED.setdefault(owner, [])
    for verdict in verify([*first, *(one for one in cheapest_first() if one not in first)]):
        if not verdict.holds:
            first.extend([verdict.statement] if verdict.statement not in first else [])
            return True
    return False


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_broken_method_is_noticed(monkeypatch, owner, name):
    monkeypatch.setattr(owner, name, flipped(vars(owner)[name]))
    assert some_statement_fails(owner)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_broken_function_is_noticed(monkeypatch, name):
    monkeypatch.setattr(measures, name, flipped(getattr(measures, name)))
    assert some_statement_fails()


@pytest.mark.parametrize("field", gz.attention.Attention._fields[:9])  # the rest are computed on request
def test_a_broken_statistic_of_attention_is_noticed(monkeypatch, field):
    right = attention.attend

    def broken(*arguments, **options):
        found = right(*arguments, **options)
        value = getattr(found, field)
        return found if value is None else found._replace(**{field: -value})

    monkeypatch.setattr(attention, "attend", broken)
    assert some_statement_fails()


def test_a_wrong_merge_of_attentions_is_noticed(monkeypatch):
    right = gz.attention.Attention.joined
    monkeypatch.setattr(gz.attention.Attention, "joined", lambda a, b: right(a, b)._replace(output=a.output))
    assert some_statement_fails()


def test_a_wrong_maximum_entropy_law_is_noticed(monkeypatch):
    right = measures.maximum_entropy

    def broken(h, mean):
        result = right(h, mean)
        return result._replace(law=gz.tilt(h, -result.eta))

    monkeypatch.setattr(measures, "maximum_entropy", broken)
    assert some_statement_fails()


def test_wrong_boosting_is_noticed(monkeypatch):
    margin_measure, boost = measures.margin_measure, measures.boost
    monkeypatch.setattr(measures, "margin_measure", lambda y, f, s=None: margin_measure(-y, f, s))
    assert some_statement_fails()
    monkeypatch.setattr(measures, "margin_measure", margin_measure)
    monkeypatch.setattr(measures, "boost", lambda h, learner=None: boost(h, learner)._replace(weight=torch.tensor(0.1)))
    assert some_statement_fails()


def test_a_wrong_conversion_is_noticed(monkeypatch):
    from_distribution, to_distribution = measures.from_distribution, measures.to_distribution
    monkeypatch.setattr(measures, "from_distribution", lambda p: gz.pushforward(from_distribution(p), -1.0))
    assert some_statement_fails()
    monkeypatch.setattr(measures, "from_distribution", from_distribution)
    monkeypatch.setattr(measures, "to_distribution", lambda h, eta: to_distribution(h, eta * 0.9))
    assert some_statement_fails()


def test_nothing_fails_when_nothing_is_broken():
    assert not some_statement_fails()
