"""A measure is a tree: tensors are its leaves, fields of None are no leaves, static fields are its structure."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import gradlogz as gz
from support.measure_registry import NAMES, case


def tensors(part):
    """The tensors of a measure, field by field, in order."""
    if isinstance(part, gz.Measure):
        part = tuple(getattr(part, f.name) for f in dataclasses.fields(part))
    if isinstance(part, tuple):
        return [t for piece in part for t in tensors(piece)]
    return [part] if isinstance(part, torch.Tensor) else []


@pytest.mark.parametrize("name", NAMES)
def test_taking_apart_and_putting_together_changes_nothing(name):
    measure, eta, _ = case(name)
    leaves, spec = pytree.tree_flatten(measure)
    assert [id(leaf) for leaf in leaves] == [id(t) for t in tensors(measure)]
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(measure)
    assert pytree.tree_structure(again) == spec
    for field in dataclasses.fields(measure):
        one, other = getattr(measure, field.name), getattr(again, field.name)
        assert one is other or (isinstance(one, (gz.Measure, tuple)) and type(one) is type(other)) or one == other
    assert torch.equal(again.mean(eta), measure.mean(eta))


@pytest.mark.parametrize("name", NAMES)
def test_a_map_over_the_leaves_gives_a_measure(name):
    measure, eta, _ = case(name)
    single = pytree.tree_map(lambda t: t.float(), measure)
    assert single.mean(eta.float()).dtype == torch.float32
    assert single.batch_shape == measure.batch_shape
    assert single.dim == measure.dim


def test_what_is_no_tensor_is_structure():
    one = torch.ones(())
    structure = pytree.tree_structure
    assert structure(gz.Sphere(3, one)) == structure(gz.Sphere(3, 2 * one))
    assert structure(gz.Sphere(3, one)) != structure(gz.Sphere(4, one))
    assert structure(gz.Sphere(3, one)) != structure(gz.Sphere(3, one, validate=False))
    theta = torch.ones(2)
    assert structure(gz.Statistic(theta, family="beta")) != structure(gz.Statistic(theta, family="dirichlet"))
    points = torch.zeros(4, 2)
    assert structure(gz.Empirical(points)) != structure(gz.Empirical(points, torch.zeros(4)))
    assert len(pytree.tree_leaves(gz.Empirical(points))) == 1
    assert len(pytree.tree_leaves(gz.Gaussian.diagonal(theta, theta))) == 2


def test_no_check_runs_on_a_measure_that_is_put_together():
    """Leaves may be placeholders: transforms put anything there."""
    leaves, spec = pytree.tree_flatten(gz.Gamma(torch.ones(2), torch.ones(2)))
    holder = pytree.tree_unflatten([object() for _ in leaves], spec)
    assert pytree.tree_structure(holder) == spec
    negative = pytree.tree_map(lambda t: -t, gz.Gamma(torch.ones(2), torch.ones(2)))
    assert bool((negative.rate == -1).all())
