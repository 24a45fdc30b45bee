"""Break any formula on purpose and a statement fails: `gradlogz verify` then exits with 1.

Both ways: each formula of tests/support/broken_formulas.py, of every chapter, is broken in turn and some statement
fails; and each statement fails if some formula that it calls is broken, so that none is true of anything.
"""

import pytest
import torch

import gradlogz as gz
from gradlogz import attention, dynamics, measures
from gradlogz.dynamics import observables
from gradlogz.verification.program import statements, verify
from support.broken_formulas import CHAPTERS, FORMULAS, fails, negative, triple, used_by, users


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_a_broken_formula_is_noticed(formula):
    assert any(fails(one, formula) for one in users()[formula])


@pytest.mark.parametrize("one", statements(), ids=lambda s: s.key)
def test_a_statement_fails_if_a_formula_it_calls_is_broken(one):
    assert any(fails(one, formula, change) for formula in used_by()[one.key] for change in (negative, triple))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_formulas_are_listed_by_their_chapter(chapter):
    for formula in CHAPTERS[chapter]:
        module = getattr(formula.owner, "__module__", None) or formula.owner.__name__
        assert module.startswith(f"gradlogz.{chapter}"), str(formula)


def test_nothing_fails_when_nothing_is_broken():
    users()
    assert all(result.holds for result in verify())


# Results that are no numbers ----------------------------------------------------------------------------------------


def failing(*keys):
    """Those of these statements that fail."""
    return [result.statement.key for key in keys for result in verify(statements(key)) if not result.holds]


def test_a_wrong_merge_of_attentions_is_noticed(monkeypatch):
    right = attention.Attention.joined
    monkeypatch.setattr(attention.Attention, "joined", lambda a, b: right(a, b)._replace(output=a.output))
    assert failing("3.8 merge")


def test_a_wrong_maximum_entropy_law_is_noticed(monkeypatch):
    right = measures.maximum_entropy

    def broken(h, mean):
        result = right(h, mean)
        return result._replace(distribution=gz.tilt(h, -result.eta))

    monkeypatch.setattr(measures, "maximum_entropy", broken)
    assert failing("E11")


def test_wrong_boosting_is_noticed(monkeypatch):
    margin_measure, boost = measures.margin_measure, measures.boost
    monkeypatch.setattr(measures, "margin_measure", lambda y, f, s=None: margin_measure(-y, f, s))
    assert failing("E18")
    monkeypatch.setattr(measures, "margin_measure", margin_measure)
    monkeypatch.setattr(measures, "boost", lambda h, learner=None: boost(h, learner)._replace(weight=torch.tensor(0.1)))
    assert failing("E18")


def test_a_wrong_conversion_is_noticed(monkeypatch):
    from_distribution, to_distribution = measures.from_distribution, measures.to_distribution
    monkeypatch.setattr(measures, "from_distribution", lambda p: gz.pushforward(from_distribution(p), -1.0))
    assert failing("1b torch")
    monkeypatch.setattr(measures, "from_distribution", from_distribution)
    monkeypatch.setattr(measures, "to_distribution", lambda h, eta: to_distribution(h, eta * 0.9))
    assert failing("1b back")


def test_a_wrong_mass_at_the_critical_point_is_noticed(monkeypatch):
    def unchecked(self, h, g):
        self.h, self.g = h, g

    monkeypatch.setattr(measures.Gibbs, "__init__", unchecked)
    assert failing("8.5 critical")


@pytest.mark.parametrize("maker", ["hebbian", "gaussian_machine", "boltzmann_machine"])
def test_a_wrong_network_of_spins_is_noticed(monkeypatch, maker):
    right = getattr(dynamics, maker)
    monkeypatch.setattr(dynamics, maker, lambda first, *rest, **options: right(0.9 * first, *rest, **options))
    assert failing("5.9 Hebb", "5.9 Ising", "5.9 hidden Gaussians", "5.9 RBM")


def test_a_wrong_law_of_visible_spins_is_noticed(monkeypatch):
    right = dynamics.visible_distribution

    def broken(machine):
        law = right(machine)
        return gz.Empirical(law.points, -law.log_weights)

    monkeypatch.setattr(dynamics, "visible_distribution", broken)
    assert failing("5.9 hidden Gaussians") == ["5.9 hidden Gaussians"]
    assert failing("5.9 RBM") == ["5.9 RBM"]


def test_a_wrong_observable_is_noticed(monkeypatch):
    right = observables.OBSERVABLES["log_pair_energy"]
    monkeypatch.setitem(observables.OBSERVABLES, "log_pair_energy", lambda *args: 0.5 * right(*args))
    assert failing("5.3")
