"""The third derivative of the log normaliser is the third central moment.   [theory 3.1]"""

import pytest
import torch
from hypothesis import given, settings

from support.measure_agreement import dot, longest
from support.measure_registry import NAMES, case, magnitudes, query_shapes, seeds
from support.scales import close, scale_of

CARRIED = [name for name in NAMES if case(name).measure.atoms(case(name).eta) is not None]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_third_cumulant_is_the_third_derivative_of_the_log_normalizer(name, seed, queries, magnitude):
    measure, eta, source = case(name, seed, queries=queries, magnitude=magnitude)
    left, right = source.normal(*eta.shape), source.normal(*eta.shape)

    def along(f, vector):
        return lambda e: (torch.func.grad(f)(e) * vector).sum()

    third = torch.func.grad(along(along(lambda e: measure.log_normalizer(e).sum(), left), right))(eta)
    close(measure.third_cumulant(eta, left, right), third, scale_of(measure, eta, 3) * longest(left, right))


@pytest.mark.parametrize("name", CARRIED)
@given(seed=seeds, magnitude=magnitudes)
def test_third_cumulant_is_the_third_central_moment(name, seed, magnitude):
    measure, eta, source = case(name, seed, magnitude=magnitude)
    left, right = source.normal(*eta.shape), source.normal(*eta.shape)
    points, p = measure.atoms(eta)
    x = points.unsqueeze(-3) - (p @ points).unsqueeze(-2)  # [*b, m, n, d], centred at the mean of each query
    moment = torch.einsum("...mn,...mnd,...mne,...mnf,...me,...mf->...md", p, x, x, x, left, right)
    close(measure.third_cumulant(eta, left, right), moment, scale_of(measure, eta, 3) * longest(left, right))


@pytest.mark.parametrize("name", NAMES)
def test_third_cumulant_is_symmetric_in_its_three_vectors(name):
    measure, eta, source = case(name)
    u, v, w = (source.normal(*eta.shape) for _ in range(3))
    scale = scale_of(measure, eta, 3) * longest(u, v, w)
    once = dot(measure.third_cumulant(eta, u, v), w)
    close(dot(measure.third_cumulant(eta, v, u), w), once, scale)
    close(dot(measure.third_cumulant(eta, w, u), v), once, scale)


@pytest.mark.parametrize("name", CARRIED)
def test_it_holds_in_float32(name):
    measure, eta, source = case(name, dtype=torch.float32)
    left, right = source.normal(*eta.shape), source.normal(*eta.shape)
    points, p = (t.double() for t in measure.atoms(eta))
    x = points.unsqueeze(-3) - (p @ points).unsqueeze(-2)
    moment = torch.einsum("...mn,...mnd,...mne,...mnf,...me,...mf->...md", p, x, x, x, left.double(), right.double())
    scale = scale_of(measure, eta, 3) * longest(left, right)
    close(measure.third_cumulant(eta, left, right), moment.float(), scale)
