"""Errors of a filter that has the right model are chi-square beside their covariances, and bands hold what they say."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from gradlogz import Prior, SwitchingModel, imm, smooth
from gradlogz.filters import (
    Consistency,
    constant_velocity,
    coordinated_turn,
    enumerate_modes,
    in_gate,
    nees,
    normalized_innovation,
)
from support.scales import close
from support.switching_oracles import F64, beginning, system


def simulated(model, start, modes, generator):
    """States and observations of modes [runs, t]."""

    def noise(covariance):
        z = torch.randn(len(modes), covariance.shape[-1], 1, dtype=F64, generator=generator)
        return (torch.linalg.cholesky(covariance) @ z).squeeze(-1)

    def affine(A, x, offset):
        return (A @ x.unsqueeze(-1)).squeeze(-1) + (0.0 if offset is None else offset[j])

    x = start.mean + noise(start.covariance)
    states, seen = [], []
    for j in modes.unbind(-1):
        x = affine(model.F[j], x, model.b) + noise(model.Q[j])
        states.append(x)
        seen.append(affine(model.H[j], x, model.d) + noise(model.R[j]))
    return torch.stack(states, 1), torch.stack(seen, 1)


def case(runs=400, steps=10):
    model, start = system(1, 3, 2), beginning(1, 3, shared=True)
    start = Prior(start.mean, start.covariance)
    x, y = simulated(model, start, torch.zeros(runs, steps, dtype=torch.long), torch.Generator().manual_seed(0))
    return model, start, x, y


def test_distances_are_those_of_numpy():
    model, start, x, y = case(3, 4)
    found = imm(model, y, start)
    nis, e = normalized_innovation(found), nees(found, x)
    for i, t in ((0, 0), (2, 3)):
        v, S = found.innovation[i, t].numpy(), found.innovation_covariance[i, t].numpy()
        np.testing.assert_allclose(nis.value[i, t], v @ np.linalg.inv(S) @ v, rtol=1e-10)
        d, P = (x - found.mean)[i, t].numpy(), found.covariance[i, t].numpy()
        np.testing.assert_allclose(e.value[i, t], d @ np.linalg.inv(P) @ d, rtol=1e-10)
    assert (nis.degrees == 2).all()
    assert (e.degrees == 3).all()


def test_the_right_model_has_chi_square_distances():
    """4000 innovations are independent, so that their law can be tested; states are not, so that one time is."""
    model, start, x, y = case()
    found = imm(model, y, start)
    nis, e = normalized_innovation(found, level=0.9), nees(found, x, level=0.9)
    assert scipy.stats.kstest(nis.value.flatten(), scipy.stats.chi2(2).cdf).pvalue > 0.01
    assert scipy.stats.kstest(e.value[:, -1], scipy.stats.chi2(3).cdf).pvalue > 0.01
    assert abs(float(nis.holds.double().mean()) - 0.9) < 0.02
    assert bool(nis.mean().holds)
    assert nis.mean().value.shape == ()
    assert nis.mean(0).value.shape == (10,)


def test_a_filter_that_is_too_sure_is_seen():
    model, start, x, y = case()
    sure = type(model)(model.transition, model.F, model.Q / 4, model.H, model.R / 4, model.b, model.d)
    wrong = normalized_innovation(imm(sure, y, start)).mean()
    assert wrong.value > wrong.high
    unsure = type(model)(model.transition, model.F, model.Q * 4, model.H, model.R * 4, model.b, model.d)
    wrong = nees(imm(unsure, y, start), x).mean()
    assert wrong.value < wrong.low


def test_the_band_of_a_mean_is_that_of_a_sum():
    value = torch.ones(20, 5, dtype=F64)
    found = Consistency(value, value, value, 2 * value, 0.95).mean()
    close(found.low, torch.tensor(scipy.stats.chi2(200).ppf(0.025) / 100), tolerance=1e-8)
    close(found.high, torch.tensor(scipy.stats.chi2(200).ppf(0.975) / 100), tolerance=1e-8)
    assert found.degrees == 2


def test_gaps_have_fewer_degrees():
    model, start, _, y = case(2, 4)
    y[0, 1], y[1, 2, 0] = math.nan, math.nan
    nis = normalized_innovation(imm(model, y, start))
    assert nis.degrees.tolist() == [[2, 0, 2, 2], [2, 2, 1, 2]]
    assert nis.value.isnan().tolist() == [[False, True, False, False], [False] * 4]
    assert nis.mean().degrees == 13 / 7
    seen = imm(model, y, start)
    inside = in_gate(seen.innovation, seen.innovation_covariance, probability=1 - 1e-9)
    assert inside.tolist() == [[True, False, True, True], [True] * 4]


def known(direction, runs=400, steps=6):
    """Runs of a system that is certain of what lies across the direction in which it moves, from a known start."""
    along = torch.tensor(direction, dtype=F64)
    model = SwitchingModel(
        torch.ones(1, 1, dtype=F64),
        F=torch.eye(3, dtype=F64).expand(1, 3, 3),
        Q=(along.outer(along)).expand(1, 3, 3),
        H=torch.ones(1, 1, 3, dtype=F64),
        R=torch.full((1, 1, 1), 1e-4, dtype=F64),
    )
    start = Prior(torch.tensor([1.0, -2.0, 0.5], dtype=F64), torch.zeros(3, 3, dtype=F64))
    generator = torch.Generator().manual_seed(0)
    moved = torch.randn(runs, steps, 1, dtype=F64, generator=generator).cumsum(1)
    x = start.mean + moved * along
    return model, start, x, x.sum(-1, keepdim=True) + 0.01 * torch.randn(runs, steps, 1, dtype=F64, generator=generator)


@pytest.mark.parametrize("direction", [(0.0, 300.0, 0.0), (120.0, -40.0, 70.0)])
def test_what_is_certain_has_no_degrees_of_freedom(direction):
    """On the line that is its support, P is one variance: NEES is the square of the error along it."""
    model, start, x, y = known(direction)
    for found in (imm(model, y, start), smooth(model, y, start)):
        e = nees(found, x)
        assert (e.degrees == 1).all()
        unit = torch.tensor(direction, dtype=F64)
        unit = unit / unit.norm()
        along, variance = (x - found.mean) @ unit, (found.covariance @ unit) @ unit
        close(e.value, along**2 / variance, scale=1 + along**2 / variance, tolerance=1e-6)  # 2e-16 of 300² in 1e-4
        assert scipy.stats.kstest(e.value[:, -1], scipy.stats.chi2(1).cdf).pvalue > 0.01
        assert e.mean().holds
    away = torch.tensor([1.0, 1.0, 1.0], dtype=F64)
    wrong = nees(found, x + away)
    assert (wrong.value == torch.inf).all()
    assert not wrong.holds.any()
    assert wrong.mean().value == torch.inf


def test_components_are_judged_by_themselves():
    model, start, x, y = case(50, 4)
    found = imm(model, y, start)
    pair = nees(found, x[..., [2, 0]], components=(2, 0))
    e, P = (x - found.mean)[..., [2, 0]].numpy(), found.covariance[..., [2, 0], :][..., [2, 0]].numpy()
    close(
        pair.value, torch.as_tensor(np.einsum("btc,btcd,btd->bt", e, np.linalg.inv(P), e)), pair.value, tolerance=1e-10
    )
    assert (pair.degrees == 2).all()
    partly = x.clone()
    partly[..., 1] = torch.nan  # a component of which the truth is not known
    close(nees(found, partly).value, pair.value, pair.value, tolerance=1e-10)
    assert nees(found, x * torch.nan).value.isnan().all()


def test_units_do_not_matter():
    model, start, x, y = case(20, 3)
    found = imm(model, y, start)
    unit = torch.tensor([1e-9, 1.0, 1e12], dtype=F64)
    scaled = found._replace(
        mean=found.mean * unit,
        covariance=found.covariance * unit * unit[:, None],
        predicted_covariance=found.predicted_covariance * unit * unit[:, None],
    )
    e = nees(found, x)
    close(nees(scaled, x * unit).value, e.value, e.value, tolerance=1e-9)


def test_gates_hold_what_they_say():
    model, start, _, y = case(2000, 2)
    found = imm(model, y, start)
    inside = in_gate(found.innovation, found.innovation_covariance, probability=0.8)
    assert abs(float(inside.double().mean()) - 0.8) < 0.02
    candidates = found.innovation.unsqueeze(-2) + torch.tensor([[0.0, 0.0], [1e3, 0.0]], dtype=F64)
    many = in_gate(candidates, found.innovation_covariance.unsqueeze(-3), probability=0.8)
    assert torch.equal(many[..., 0], inside)
    assert not many[..., 1].any()


def test_several_modes_have_the_mean_of_chi_square():
    """The covariance of a mixture is that of its innovations, however heavy its tails: NIS averages to o."""
    model, start = system(2, 1, 1), beginning(2, 1)
    x = torch.linspace(-80, 80, 16_001, dtype=F64)
    found = imm(model, x[:, None, None], start)
    density = found.step_log_likelihood[:, 0].exp() * (x[1] - x[0])
    value = normalized_innovation(found).value[:, 0]
    # IMM mixes before it predicts: the density it reports is its own, whose moments are those it reports too.
    close((density * value).sum(), torch.ones((), dtype=F64), tolerance=1e-8)


def test_the_exact_filter_has_errors_of_its_covariance_though_its_law_is_a_mixture():
    """E (x - m)^T P^-1 (x - m) = E trace P^-1 Cov(x | y) = s, if modes are drawn from the chain too.

    A filter that follows the likeliest history alone is too sure of itself.
    """
    options = {"dt": 1.0, "spectral_density": 0.01, "observation_variance": 0.25, "dtype": F64}
    model = SwitchingModel.of(
        [constant_velocity(2, **options), coordinated_turn(2, rate=0.6, **options)],
        transition=torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=F64),
    )
    start = Prior(torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=F64), torch.eye(4, dtype=F64))
    generator, runs = torch.Generator().manual_seed(0), 4000
    modes = [torch.randint(2, (runs,), generator=generator)]
    for _ in range(6):
        modes.append(torch.multinomial(model.transition[modes[-1]], 1, generator=generator).squeeze(-1))
    x, y = simulated(model, start, torch.stack(modes[1:], -1), generator)
    value = nees(enumerate_modes(model, y, start).filtered, x).value.mean(-1) / 4
    error = float(value.std()) / math.sqrt(runs)
    assert error < 0.01
    assert abs(float(value.mean()) - 1) < 3 * error
    sure = nees(enumerate_modes(model, y, start, max_histories=1).filtered, x).value.mean(-1) / 4
    assert float(sure.mean()) > 1.1
