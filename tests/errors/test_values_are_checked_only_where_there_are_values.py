"""Shapes are always checked; values only on concrete tensors, and not with validate=False.

Inside torch.func transforms, on the meta device and with validate=False a bad value passes; a bad shape never does.
"""

import math

import pytest
import torch
from torch.func import grad, jacfwd, vmap

import gradlogz as gz
from gradlogz._errors import InputValueError
from support.error_form import check_form

nan, one, two = torch.nan, torch.ones(1), torch.ones(2)

# name: builds a measure from one tensor, a bad value of that tensor, and its good value.
BUILT = {
    "empirical points": (gz.Empirical, torch.full((4, 3), nan), torch.ones(4, 3)),
    "empirical weights": (lambda w, **o: gz.Empirical(torch.ones(4, 3), w, **o), torch.full((4,), nan), torch.zeros(4)),
    "masses": (lambda w, **o: gz.Empirical.weighted(torch.ones(4, 3), w, **o), -torch.ones(4), torch.ones(4)),
    "indefinite covariance": (lambda S, **o: gz.Gaussian(two, S, **o), -torch.eye(2), torch.eye(2)),
    "negative variance": (lambda v, **o: gz.Gaussian.diagonal(two, v, **o), -two, two),
    "mixture weights": (
        lambda w, **o: gz.Mixture(w, gz.Gaussian.diagonal(torch.ones(2, 3), torch.ones(2, 3)), **o),
        two,
        two - 1 - math.log(2),
    ),
    "radius": (lambda r, **o: gz.Sphere(3, r, **o), -torch.ones(()), torch.ones(())),
    "gamma": (lambda r, **o: gz.Gamma(one, r, **o), -one, one),
    "inverse gaussian": (lambda r, **o: gz.InverseGaussian(one, r, **o), -one, one),
    "poisson": (gz.Poisson, -one, one),
    "spins": (gz.Spins, one * nan, one),
    "one hot": (gz.OneHot, two, two - 1 - math.log(2)),
    "wishart": (lambda V, **o: gz.Wishart(torch.tensor(4.0), V, **o), torch.ones(2, 2), torch.eye(2)),
    "degrees of freedom": (lambda n, **o: gz.Wishart(n, torch.eye(2), **o), torch.tensor(0.5), torch.tensor(4.0)),
    "statistic": (lambda t, **o: gz.Statistic(t, family="normal", **o), two, -two),
    "prior": (lambda x, **o: gz.ConjugatePrior(x, torch.tensor(3.0), base="poisson", **o), -one, one),
}
built = pytest.mark.parametrize("name", BUILT)


@built
def test_a_bad_value_is_refused(name):
    build, bad, good = BUILT[name]
    build(good)
    with pytest.raises(ValueError, match=" must ") as caught:
        build(bad)
    check_form(str(caught.value))


@built
def test_without_validation_it_passes(name):
    build, bad, _ = BUILT[name]
    assert build(bad, validate=False).validate is False


@built
def test_inside_vmap_and_grad_it_passes(name):
    build, bad, _ = BUILT[name]
    assert vmap(lambda t: build(t) and t.sum())(bad.expand(2, *bad.shape)).shape == (2,)
    assert grad(lambda t: build(t) and t.sum())(bad).shape == bad.shape
    assert jacfwd(lambda t: build(t) and t.sum())(bad).shape == bad.shape


@pytest.mark.parametrize("name", ["empirical points", "poisson", "spins", "one hot", "statistic"])
def test_without_values_there_is_nothing_to_refuse(name):
    build, bad, _ = BUILT[name]
    assert build(bad.to("meta")).dim == build(bad, validate=False).dim


SHAPES = {
    "empirical": (lambda **o: gz.Empirical(one, **o), "Empirical"),
    "weights": (lambda **o: gz.Empirical(torch.ones(4, 3), torch.zeros(5), **o), "Empirical"),
    "gaussian": (lambda **o: gz.Gaussian(two, torch.eye(3), **o), "Gaussian"),
    "mixture": (
        lambda **o: gz.Mixture(two, gz.Gaussian(torch.ones(3, 3), torch.eye(3).expand(3, 3, 3)), **o),
        "Mixture",
    ),
    "sphere": (lambda **o: gz.Sphere(1, **o), "Sphere"),
    "gamma": (lambda **o: gz.Gamma(one, two, **o), "Gamma"),
    "one hot": (lambda **o: gz.OneHot(torch.zeros(()), **o), "OneHot"),
    "wishart": (lambda **o: gz.Wishart(one, torch.eye(2), **o), "Wishart"),
    "statistic": (lambda **o: gz.Statistic(one, family="normal", **o), "Statistic"),
    "prior": (lambda **o: gz.ConjugatePrior(one, one, base="poisson", **o), "ConjugatePrior"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_bad_shape_is_refused_without_validation_too(name):
    build, call = SHAPES[name]
    with pytest.raises(InputValueError) as caught:
        build(validate=False)
    assert caught.value.call == call


def test_a_bad_dtype_is_refused_without_validation_too():
    with pytest.raises(TypeError, match="float32 or float64"):
        gz.Poisson(one.long(), validate=False)


gamma, beyond = gz.Gamma(one, one), torch.tensor([2.0])


def test_the_domain_is_not_asked_without_validation_or_inside_transforms():
    assert gz.Gamma(one, one, validate=False).log_normalizer(beyond).isnan()
    assert gz.Gamma(one, one, validate=False).mean(one * nan).isnan()
    assert vmap(gamma.mean)(beyond.expand(3, 1)).shape == (3, 1)
    assert grad(gamma.log_normalizer)(beyond).shape == (1,)
    assert vmap(gamma.mean)(nan * beyond.expand(3, 1)).isnan().all()


def test_shapes_of_eta_are_asked_everywhere():
    unchecked = gz.Gamma(one, one, validate=False)
    for call in (
        lambda: unchecked.mean(two),
        lambda: vmap(gamma.mean)(two.expand(3, 2)),
        lambda: grad(gamma.log_normalizer)(two),
    ):
        with pytest.raises(ValueError, match="eta must end in d=1"):
            call()


def test_the_dual_refuses_a_mean_of_nan():
    with pytest.raises(ValueError, match="dual: mean must be finite"):
        gz.dual(gamma, one * nan)
