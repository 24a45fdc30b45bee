"""A Python number is accepted wherever a scalar tensor is, and means the same."""

import pytest
import torch
from torch.utils import _pytree as pytree

import gradlogz as gz
from gradlogz._typing import as_scalar_tensor
from gradlogz.contrastive import Likelihood, info_nce, nce, siglip
from gradlogz.dynamics import Ascent, GaussianCloud, evolve

EYE, POINTS = torch.eye(2, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
H = gz.Empirical(POINTS)
BATCH = gz.Empirical(torch.stack((POINTS, 2 * POINTS)))
NEGATIVES = {"positive": torch.arange(6), "negatives": torch.arange(6).roll(1)[:, None]}
NOISE = torch.zeros(6, dtype=torch.float64)

# What is made of a number that may also be a tensor [*b].
SCALARS = {
    "Wishart(df)": (lambda x: gz.Wishart(x, EYE), 5.0),
    "ConjugatePrior(nu)": (lambda x: gz.ConjugatePrior(POINTS[0], x, base="gaussian"), 4.0),
    "reweight(log_mass)": (lambda x: gz.reweight(H, x), -1.5),
    "pushforward(matrix)": (lambda x: gz.pushforward(H, x), 0.5),
    "Likelihood(temperature)": (lambda x: Likelihood(POINTS, POINTS, temperature=x).log_probability(), 0.3),
    "info_nce(temperature)": (lambda x: info_nce(POINTS, POINTS, temperature=x), 0.3),
    "siglip(offset)": (lambda x: siglip(POINTS, POINTS, offset=x), -2.0),
    "nce(log_normalizer)": (lambda x: nce(POINTS, POINTS, noise=NOISE, log_normalizer=x, **NEGATIVES), 0.7),
    "Ascent(tau)": (lambda x: evolve(POINTS, Ascent(tau=x), steps=2).cloud, 0.25),
    "Ascent(beta)": (lambda x: evolve(POINTS, Ascent(beta=x), steps=2).cloud, 0.25),
    "GaussianCloud, Ascent(tau)": (lambda x: GaussianCloud(POINTS[0, :2], EYE).evolve(Ascent(tau=x)), 0.25),
}


def same(number, tensor):
    one, other = pytree.tree_flatten(number), pytree.tree_flatten(tensor)
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", SCALARS)
def test_a_number_is_the_tensor_of_it(name):
    build, value = SCALARS[name]
    same(build(value), build(torch.tensor(value, dtype=torch.float64)))
    if value == round(value):
        same(build(int(value)), build(torch.tensor(value, dtype=torch.float64)))


def test_a_sphere_has_a_radius_in_numbers():
    same(gz.Sphere(3, 2.0), gz.Sphere(3, torch.tensor(2.0)))
    same(gz.Sphere(3, 2), gz.Sphere(3, torch.tensor(2.0)))
    assert gz.Sphere(3).radius == gz.Sphere(3, 1.0).radius == 1.0


@pytest.mark.parametrize("number", [0.5, 2])
def test_a_number_serves_a_whole_batch(number):
    eta = POINTS[:2]
    ones = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(
        gz.reweight(BATCH, number).log_normalizer(eta), gz.reweight(BATCH, number * ones).log_normalizer(eta)
    )
    scales = torch.stack((EYE, 2 * EYE))
    assert torch.equal(gz.Wishart(3.0 + number, scales).df, (3.0 + number) * ones)
    assert torch.equal(gz.ConjugatePrior(POINTS, number, base="gaussian").nu, number * ones)


def test_what_is_no_number_stays_as_it_is():
    for value in ("1", None, [1.0], True, torch.ones(2)):
        assert as_scalar_tensor(value) is value
    assert as_scalar_tensor(1).dtype == torch.get_default_dtype()
    assert as_scalar_tensor(1, torch.ones((), dtype=torch.float64), 2).shape == (1, 1)


def test_numbers_are_made_tensors_while_compiling():
    def mean(eta):
        return gz.Sphere(3, 2.0).mean(eta) + gz.reweight(gz.Empirical(torch.eye(3)), 1.0).mean(eta)

    eta = torch.tensor([0.5, 1.0, -0.5])
    compiled = torch.compile(mean, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(eta), mean(eta))
