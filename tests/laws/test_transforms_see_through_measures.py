"""Measures as arguments, in closures, built inside, mapped over and differentiated: as in plain loops."""

import dataclasses

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

import gradlogz as gz
from support.measure_agreement import dot, longest, scales
from support.measure_registry import NAMES, Source, case
from support.scales import close, scale_of


def functional(measure, eta, vector):
    """One number per query that needs G, its gradient and its Hessian."""
    product = measure.covariance_product(eta, vector)
    return measure.log_normalizer(eta) + dot(measure.mean(eta) + product, vector)


def built(part):
    """The measure made anew by its own constructors, from the same tensors."""
    if isinstance(part, gz.Measure):
        return dataclasses.replace(part, **{n: built(getattr(part, n)) for n in part._free})
    return tuple(map(built, part)) if isinstance(part, tuple) else part


def scale(measure, eta, *vectors):
    return torch.stack(scales(measure, eta)).amax() * (1 + longest(*vectors)) ** 2


@pytest.mark.parametrize("name", NAMES)
def test_mapping_over_queries_is_a_loop_over_them(name):
    """The measure in a closure, as an argument, and built inside."""
    measure, eta, source = case(name)
    vector, axis = source.normal(*eta.shape), len(measure.batch_shape)
    rows = [functional(measure, eta.select(axis, i), vector.select(axis, i)) for i in range(eta.shape[axis])]
    expected, size = torch.stack(rows, axis), scale(measure, eta, vector)
    closure = vmap(lambda e, v: functional(measure, e, v), in_dims=axis, out_dims=axis)(eta, vector)
    argument = vmap(functional, in_dims=(None, axis, axis), out_dims=axis)(measure, eta, vector)
    inside = vmap(lambda e, v: functional(built(measure), e, v), in_dims=axis, out_dims=axis)(eta, vector)
    for mapped in (closure, argument, inside):
        close(mapped, expected, size)


@pytest.mark.parametrize("name", NAMES)
def test_mapping_over_measures_is_a_loop_over_them(name):
    cases = [case(name, seed) for seed in range(3)]
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *(c.measure for c in cases))
    eta = torch.stack([c.eta for c in cases])
    vector, size = cases[0].source.normal(*eta.shape), scale(stacked, eta, eta)
    expected = torch.stack([functional(c.measure, eta[i], vector[i]) for i, c in enumerate(cases)])
    close(vmap(functional)(stacked, eta, vector), expected, size * (1 + longest(vector)) ** 2)
    inside = vmap(lambda m, e, v: functional(built(m), e, v))(stacked, eta, vector)
    close(inside, expected, size * (1 + longest(vector)) ** 2)


@pytest.mark.parametrize("name", NAMES)
def test_measures_of_a_map_may_share_their_queries(name):
    cases = [case(name, seed) for seed in range(3)]
    stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves), *(c.measure for c in cases))
    eta = 0.1 * cases[0].source.normal(*cases[0].eta.shape)  # small enough for the domain of every measure
    expected = torch.stack([functional(c.measure, eta, eta) for c in cases])
    shared = vmap(functional, in_dims=(0, None, None))(stacked, eta, eta)
    close(shared, expected, scale(stacked, torch.stack((eta, eta, eta)), eta))


@pytest.mark.parametrize("name", NAMES)
def test_jacobians_in_the_query_are_loops_over_outputs(name):
    measure, eta, source = case(name, queries=())
    vector, size = source.normal(*eta.shape), scale_of(measure, eta, 2)
    at = eta.clone().requires_grad_()
    mean = measure.mean(at)
    rows = [torch.autograd.grad(out, at, retain_graph=True)[0] for out in mean.flatten()]
    jacobian = torch.stack(rows).reshape(*eta.shape, *eta.shape)
    close(jacrev(measure.mean)(eta), jacobian, size)
    close(jacfwd(measure.mean)(eta), jacobian, size)
    close(hessian(lambda e: measure.log_normalizer(e).sum())(eta), jacobian, size)
    along = (jacobian.reshape(eta.numel(), -1) @ vector.flatten()).reshape(eta.shape)
    close(jvp(measure.mean, (eta,), (vector,))[1], along, size * longest(vector))


@pytest.mark.parametrize("name", NAMES)
def test_the_derivative_in_the_measure_is_that_of_its_tensors(name):
    """Reverse and forward mode of torch.func, autograd, and differences of the function itself."""
    measure, eta, source = case(name)
    eta, vector = eta / 2, source.normal(*eta.shape)
    leaves, spec = pytree.tree_flatten(measure)
    # A direction that keeps matrices symmetric and points without mass without mass.
    direction = [leaf.tanh() for leaf in leaves]

    def value(*tensors):
        return functional(pytree.tree_unflatten(list(tensors), spec), eta, vector).sum()

    step = 1e-5
    ahead, behind = (value(*(t + s * d for t, d in zip(leaves, direction, strict=True))) for s in (step, -step))
    slope = (ahead - behind) / (2 * step)
    size = scale(measure, eta, vector) * (1 + sum(leaf.tanh().norm() for leaf in leaves))

    gradient = grad(lambda m: functional(m, eta, vector).sum())(measure)
    assert type(gradient) is type(measure)
    pieces = pytree.tree_leaves(gradient)
    assert all(bool(torch.isfinite(g).all()) for g in pieces)
    close(sum((g * d).sum() for g, d in zip(pieces, direction, strict=True)), slope, size, tolerance=1e-8)
    forward = jvp(value, tuple(leaves), tuple(direction))[1]
    close(forward, slope, size, tolerance=1e-8)

    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    plain = torch.autograd.grad(value(*tracked), tracked, materialize_grads=True)
    for a, b in zip(pieces, plain, strict=True):
        close(a, b, size)
    inside = grad(lambda m: functional(built(m), eta, vector).sum())(measure)
    for a, b in zip(pytree.tree_leaves(inside), plain, strict=True):
        close(a, b, size)


@pytest.mark.parametrize(
    "name", ["empirical", "empirical, masked", "gaussian", "mixture of gaussians", "sphere", "gamma"]
)
def test_every_query_has_its_own_derivative_in_the_measure(name):
    """vmap over grad: per-example gradients."""
    measure, eta, source = case(name)
    vector = source.normal(*eta.shape)
    each = vmap(grad(functional), in_dims=(None, 0, 0))(measure, eta, vector)
    for i in range(eta.shape[0]):
        alone = grad(lambda m, i=i: functional(m, eta[i], vector[i]))(measure)
        for a, b in zip(pytree.tree_leaves(each), pytree.tree_leaves(alone), strict=True):
            close(a[i], b, scale(measure, eta, vector))


TWICE = {
    "empirical": lambda s: (gz.Empirical, s.normal(5, 2), s.normal(5)),
    "empirical, weights per query": lambda s: (gz.Empirical, s.normal(5, 2), s.normal(3, 5)),
    "gaussian": lambda s: (lambda mu, A: gz.Gaussian(mu, A @ A.mT), s.normal(2), s.normal(2, 2)),
    "mixture": lambda s: (
        lambda w, mu, v: gz.Mixture(w.log_softmax(-1), gz.Gaussian.diagonal(mu, v)),
        s.normal(3),
        s.normal(3, 2),
        s.positive(3, 2),
    ),
    "sphere": lambda s: (lambda r: gz.Sphere(2, r), s.positive()),
    "wishart": lambda s: (
        lambda n, A: gz.Wishart(n, A @ A.mT + 0.1 * torch.eye(1)),
        s.positive(low=2.5),
        s.normal(1, 1),
    ),
    "dirichlet": lambda s: (lambda a: gz.Statistic(a, family="dirichlet"), s.positive(2, low=1.0)),
}


@pytest.mark.parametrize("name", list(TWICE))
def test_attention_can_be_differentiated_twice(name):
    """Finite differences of the gradients of the mean, in the query and in the tensors of the measure."""
    source = Source(0)
    build, *tensors = TWICE[name](source)
    eta = 0.2 * source.normal(3, build(*tensors).dim)
    inputs = [t.requires_grad_() for t in (eta, *tensors)]
    assert torch.autograd.gradcheck(lambda e, *t: build(*t).mean(e), inputs)
    assert torch.autograd.gradgradcheck(lambda e, *t: build(*t).mean(e), inputs)
    assert torch.autograd.gradgradcheck(lambda e, *t: build(*t).log_normalizer(e), inputs)
