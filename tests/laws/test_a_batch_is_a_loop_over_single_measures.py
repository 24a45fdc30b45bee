"""Batches come first, queries after them, and broadcast against size 1 only.   [the shape law of measure.py]"""

import pytest
import torch
from torch.utils import _pytree as pytree

from gradlogz import Empirical, Mixture
from support.measure_agreement import scales
from support.measure_registry import NAMES, case
from support.scales import close

BATCHED = [name for name in NAMES if len(case(name).measure.batch_shape) == 1]
STATISTICS = ["log_normalizer", "mean", "covariance", "support", "in_domain", "relative_entropy"]
OF_TWO = ["covariance_product", "kl", "log_density"]


def at(measure, index):
    """One measure of a batch; a leaf of size 1 serves them all."""
    return pytree.tree_map(lambda x: x[0 if x.shape[0] == 1 else index], measure)


def statistics(measure, eta, other):
    results = [getattr(measure, name)(eta) for name in STATISTICS]
    results += [getattr(measure, name)(eta, other) for name in OF_TWO]
    return [*results, measure.third_cumulant(eta, other, other)]


def same(actual, expected, scale):
    for a, e in zip(actual, expected, strict=True):
        if a.dtype == torch.bool:
            assert torch.equal(a, e)
        else:
            close(a, e, scale)


def scale(measure, *etas):
    return torch.stack([s for eta in etas for s in scales(measure, eta)]).amax()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_measures_is_a_loop_over_them(name):
    """Measures of three seeds, stacked leaf by leaf."""
    cases = [case(name, seed) for seed in range(3)]
    measure = pytree.tree_map(lambda *leaves: torch.stack(leaves), *(c.measure for c in cases))
    eta = torch.stack([c.eta for c in cases])
    other = eta.flip(-2)  # in the domain as well
    assert measure.batch_shape == (3, *cases[0].measure.batch_shape)
    joint, size = statistics(measure, eta, other), scale(measure, eta)
    for i, c in enumerate(cases):
        same([r[i] for r in joint], statistics(c.measure, eta[i], other[i]), size)


@pytest.mark.parametrize("name", NAMES)
def test_queries_may_have_any_number_of_dimensions(name):
    measure, eta, _ = case(name, queries=(2, 3))
    other, axis = eta.flip(-2), len(measure.batch_shape)
    flat = statistics(measure, *(e.flatten(axis, axis + 1) for e in (eta, other)))
    same([r.flatten(axis, axis + 1) for r in statistics(measure, eta, other)], flat, 1.0)
    single = statistics(measure, eta.select(axis, 1).select(axis, 2), other.select(axis, 1).select(axis, 2))
    same([r.select(axis, 5) for r in flat], single, scale(measure, eta))


@pytest.mark.parametrize("name", NAMES)
def test_no_queries_give_no_results(name):
    measure, eta, _ = case(name, queries=(0,))
    batch = measure.batch_shape
    assert measure.log_normalizer(eta).shape == (*batch, 0)
    assert measure.mean(eta).shape == (*batch, 0, measure.dim)
    assert measure.covariance(eta).shape == (*batch, 0, measure.dim, measure.dim)


@pytest.mark.parametrize("name", BATCHED)
def test_size_one_broadcasts_on_either_side(name):
    measure, eta, source = case(name)
    eta = 0.1 * source.normal(*eta.shape)  # small enough for the domain of every measure of the batch
    other, size = eta.flip(-2), scale(measure, eta, eta.flip(0))
    one_measure = statistics(pytree.tree_map(lambda x: x[:1], measure), eta, other)
    one_query = statistics(measure, eta[:1], other[:1])
    for i in range(measure.batch_shape[0]):
        same([r[i] for r in one_measure], statistics(at(measure, 0), eta[i], other[i]), size)
        same([r[i] for r in one_query], statistics(at(measure, i), eta[0], other[0]), size)


@pytest.mark.parametrize("name", BATCHED)
def test_nothing_broadcasts_from_the_right(name):
    measure, eta, _ = case(name)
    batch, d = measure.batch_shape[0], measure.dim
    with pytest.raises(ValueError, match="batch"):
        measure.mean(eta[0, 0])  # [d]: the batch is missing
    with pytest.raises(ValueError, match="batch"):
        measure.mean(eta.new_zeros(batch + 1, batch, d))  # a batch in the place of the queries
    with pytest.raises(ValueError, match="query dimensions"):
        measure.kl(eta, eta[:, 0])  # one per measure beside several


def test_points_that_components_share_are_the_atoms_of_each():
    """Components with weights of their own on points of size 1: k n atoms, by sums over all of them."""
    points, log_w, eta = torch.randn(1, 4, 2).double(), torch.randn(3, 4).double(), torch.randn(5, 2).double()
    log_pi = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    h = Mixture(log_pi, Empirical(points, log_w))
    p = (log_pi[:, None] + log_w + (eta @ points[0].mT)[:, None]).exp()  # [m, k, n]
    p = p / p.sum((-2, -1), keepdim=True)
    close(h.expect(lambda x: x**3, eta), p.sum(-2) @ points[0] ** 3, 10.0)
