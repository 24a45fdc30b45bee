"""Updates by several detections average over associations: PDA's formulas, enumeration, one detection as clutter."""

import math

import numpy as np
import pytest
import torch

from gradlogz import Prior, SwitchingFilter
from gradlogz.filters import (
    NonlinearModel,
    association_probability,
    prior_with_clutter,
    range_bearing,
    with_clutter,
    without_clutter,
    wrap_angles,
)
from support.scales import close
from support.switching_oracles import F64, beginning, by_definition, observed, positive, same, system

METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
MOMENTS = ("mean", "covariance", "mode_mean", "mode_covariance")


def probabilities(*shape):
    return torch.rand(*shape, dtype=F64).softmax(-1)


@each
def test_one_mode_is_the_formula_of_probabilistic_data_association(method):
    """Textbook form: P = beta_0 P' + (1 - beta_0) P^c + K (sum beta v v^T - v v^T) K^T, written in numpy."""
    model, start = system(k=1, s=3), Prior(torch.randn(3, dtype=F64), positive(3))
    online = SwitchingFilter(model, *method)
    state = online.init(start)
    m, P = start.mean.numpy(), start.covariance.numpy()
    F, Q, H, R, b, d = (getattr(model, name)[0].numpy() for name in ("F", "Q", "H", "R", "b", "d"))
    for _ in range(3):
        z, beta = observed(model, 4), probabilities(5)
        state, found = online.update(online.predict(state), z, association=beta)
        m, P = F @ m + b, F @ P @ F.T + Q
        S = H @ P @ H.T + R
        K = P @ H.T @ np.linalg.inv(S)
        v, w = z.numpy() - H @ m - d, beta.numpy()
        total = w[1:] @ v
        spread = np.einsum("i,io,ip->op", w[1:], v, v) - np.outer(total, total)
        P = P - (1 - w[0]) * K @ S @ K.T + K @ spread @ K.T
        m = m + K @ total
        close(found.mean, torch.from_numpy(m), 100.0)
        close(found.covariance, torch.from_numpy(P), 100.0)
        close(found.innovation, torch.from_numpy(total), 100.0)
        close(found.mode_innovation[0], torch.from_numpy(total), 100.0)
        close(state.mean[0], found.mean, 10.0)


@pytest.mark.parametrize("method", ["gpb1", "gpb2", "imm"])
def test_one_step_is_the_enumeration_of_associations(method):
    """The mixture over associations of posteriors from the joint Gaussian; one step from one Gaussian is exact."""
    model, start = system(), beginning(shared=True)
    z, beta = observed(model, 3), probabilities(4)
    online = SwitchingFilter(model, *METHODS[method])
    state, found = online.update(online.predict(online.init(start)), z, association=beta)
    alone = [by_definition(model, y[None], start) for y in (torch.full_like(z[0], math.nan), *z)]
    pi = sum(w * f.log_mode_probability[0].exp() for w, f in zip(beta, alone, strict=True))
    close(found.log_mode_probability.exp(), pi, 100.0)
    for j in (None, 0, 1, 2):  # all modes, and each
        of_mode = [1.0 if j is None else f.log_mode_probability[0, j].exp() / pi[j] for f in alone]
        share = [w * p for w, p in zip(beta, of_mode, strict=True)]
        means = [f.mean[0] if j is None else f.mode_mean[0, j] for f in alone]
        covariances = [f.covariance[0] if j is None else f.mode_covariance[0, j] for f in alone]
        m = sum(w * x for w, x in zip(share, means, strict=True))
        P = sum(w * (C + torch.outer(x - m, x - m)) for w, x, C in zip(share, means, covariances, strict=True))
        close(found.mean if j is None else found.mode_mean[j], m, 100.0)
        close(found.covariance if j is None else found.mode_covariance[j], P, 100.0)
    if method != "gpb1":
        close(state.mean, found.mode_mean)
        close(state.covariance, found.mode_covariance)
    close(state.log_probability, found.log_mode_probability)


@each
def test_a_certain_association_is_an_update(method):
    model = system()
    z, online = observed(model, 3, 2), SwitchingFilter(model, *method)
    predicted = online.predict(online.init(beginning(), batch_shape=(2,)))
    for i in range(4):
        certain = torch.nn.functional.one_hot(torch.tensor([i, i]), 4).to(F64)
        alone = torch.full_like(z[:, 0], math.nan) if i == 0 else z[:, i - 1]
        state, whole = online.update(predicted, alone)
        L = whole.step_log_likelihood
        other, found = online.update(predicted, z, association=certain, step_log_likelihood=L)
        if i == 0:  # a missing observation has no innovation, an average over none has 0
            assert not bool(found.innovation.any())
            found = found._replace(innovation=whole.innovation, mode_innovation=whole.mode_innovation)
        same(found, whole, 100.0)
        for one, two in zip(other, state, strict=True):
            close(one, two, 100.0)


@pytest.mark.parametrize("method", ["imm", "gpb1"])
def test_one_detection_that_may_be_an_outlier_is_the_model_with_clutter(method):
    """For imm and gpb1 at all times; the outlier of probability p has the density N(centre, width)."""
    model, start, p = system(), beginning(), 0.2
    y, centre, width = observed(model, 5), torch.randn(2, dtype=F64), 20 * positive(2)
    clutter = torch.distributions.MultivariateNormal(centre, width)
    robust = SwitchingFilter(with_clutter(model, p, width, mean=centre), *METHODS[method])
    online = SwitchingFilter(model, *METHODS[method])
    doubled, state = robust.init(prior_with_clutter(start)), online.init(start)
    for detection in y:
        doubled, other = robust.step(doubled, detection)
        predicted = online.predict(state)
        log_clutter = clutter.log_prob(detection)
        origin = association_probability(
            online.log_density(predicted, detection[None]), detection_probability=1 - p, log_clutter_density=log_clutter
        )
        step = origin.log_ratio + log_clutter
        state, found = online.update(
            predicted, detection[None], association=origin.probability, step_log_likelihood=step
        )
        modes, outlier = without_clutter(other.log_mode_probability)
        close(found.log_mode_probability, modes, 1e3)
        close(origin.probability[0], outlier, 100.0)
        close(found.mean, other.mean, 100.0)
        close(found.covariance, other.covariance, 100.0)
        close(found.log_likelihood, other.log_likelihood, 100.0)


@each
def test_log_density_is_the_likelihood_of_a_step(method):
    model = system(lead=(2, 1))
    z, online = observed(model, 3, 2), SwitchingFilter(model, *method)
    z[0, 1], z[1, 2, 0] = math.nan, math.nan
    state = online.init(beginning(), batch_shape=(2,))
    found = online.log_density(online.predict(state), z)
    for i in range(3):
        step = online.step(state, z[:, i])[1].step_log_likelihood
        close(found[:, i].masked_fill(found[:, i].isneginf(), 0.0), step, 100.0)
    assert found.isneginf().tolist() == [[False, True, False], [False, False, False]]


def test_absent_detections_change_nothing():
    """Ragged detections: NaN of probability 0."""
    model, online = (m := system()), SwitchingFilter(m)
    predicted = online.predict(online.init(beginning()))
    z = observed(model, 3)
    z[1] = math.nan
    origin = association_probability(
        online.log_density(predicted, z), detection_probability=0.9, log_clutter_density=-5.0
    )
    kept = torch.tensor([0, 2])
    fewer = association_probability(
        online.log_density(predicted, z[kept]), detection_probability=0.9, log_clutter_density=-5.0
    )
    assert float(origin.probability[2]) == 0.0
    close(origin.log_ratio, fewer.log_ratio, 10.0)
    found = online.update(predicted, z, association=origin.probability)[1]
    other = online.update(predicted, z[kept], association=fewer.probability)[1]
    for name in (*MOMENTS, "log_mode_probability", "innovation"):
        close(getattr(found, name), getattr(other, name), 100.0)


@each
def test_no_detections_are_a_missing_observation(method):
    """A scan without detections: n = 0."""
    model, online = (m := system()), SwitchingFilter(m, *method)
    predicted = online.predict(online.init(beginning(), batch_shape=(2,)))
    nothing = observed(model, 1, 2)[:, :0]
    density = online.log_density(predicted, nothing)
    origin = association_probability(density, detection_probability=0.9, log_clutter_density=-5.0)
    close(origin.probability, torch.ones(2, 1, dtype=F64))
    _, found = online.update(predicted, nothing, association=origin.probability)
    _, missing = online.update(predicted, observed(model, 1, 2)[:, 0] * math.nan)
    for name in (*MOMENTS, "log_mode_probability", "predicted_mean", "innovation_covariance"):
        close(getattr(found, name), getattr(missing, name), 10.0)


def test_probabilities_of_association_are_those_of_bayes():
    L, p, g, clutter = torch.rand(4, dtype=F64), 0.8, 0.95, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)
    found = association_probability(
        L.log(), detection_probability=p, log_clutter_density=clutter.log(), gate_probability=g
    )
    weights = torch.cat((torch.tensor([1 - p * g], dtype=F64), p * L / clutter))
    close(found.probability, weights / weights.sum(), 10.0)
    close(found.log_ratio, weights.sum().log(), 10.0)


@pytest.mark.parametrize("way", ["ekf", "ukf"])
@each
def test_functions_and_angles(method, way):
    """Each association is an update; angles of detections are wrapped."""
    R = torch.diag(torch.tensor([0.1, 0.01], dtype=F64)).expand(2, 2, 2)
    T = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=F64)
    model = NonlinearModel(
        T, (lambda x: 1.1 * x, lambda x: 0.9 * x), positive(2, 2), range_bearing(0, 1), R, residual=wrap_angles(1),
        method=way,
    )  # fmt: skip
    online, start = SwitchingFilter(model, *method), Prior(torch.tensor([-9.0, 0.1], dtype=F64), positive(2))
    predicted = online.predict(online.init(start, batch_shape=(2,)))
    z = torch.tensor([[9.0, 3.1], [9.2, -3.1]], dtype=F64).expand(2, 2, 2)
    beta = probabilities(2, 3)
    _, found = online.update(predicted, z, association=beta)
    alone = [online.update(predicted, y)[1] for y in (torch.full_like(z[:, 0], math.nan), z[:, 0], z[:, 1])]
    close(found.mean, sum(beta[:, i, None] * f.mean for i, f in enumerate(alone)), 100.0)
    close(found.innovation, sum(beta[:, i, None] * alone[i].innovation for i in (1, 2)), 100.0)
    close(found.mode_innovation, sum(beta[:, i, None, None] * alone[i].mode_innovation for i in (1, 2)), 100.0)


def test_updates_have_gradients_in_the_probabilities():
    model, online = (m := system()), SwitchingFilter(m)
    predicted, z = online.predict(online.init(beginning())), observed(model, 2)

    def mean(logits):
        return online.update(predicted, z, association=logits.softmax(-1))[1].mean

    assert torch.autograd.gradcheck(mean, torch.randn(3, dtype=F64, requires_grad=True))
