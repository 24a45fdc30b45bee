"""The covariance is the Hessian of the log normaliser, hence positive semidefinite.   [theory E10, 3.1]"""

import pytest
import torch
from hypothesis import given, settings

from support.measure_agreement import longest
from support.measure_registry import NAMES, case, magnitudes, query_shapes, seeds
from support.scales import TOLERANCE, close, scale_of


def hessian(measure, eta):
    """The Hessian in all rows at once: [rows, rows, d, d], whose blocks off the diagonal belong to different rows."""
    full = torch.func.hessian(lambda e: measure.log_normalizer(e).sum())(eta)
    rows, d = eta.shape[:-1].numel(), eta.shape[-1]
    return full.reshape(rows, d, rows, d).transpose(1, 2)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_covariance_is_the_hessian_of_the_log_normalizer(name, seed, queries, magnitude):
    measure, eta, source = case(name, seed, queries=queries, magnitude=magnitude)
    scale, blocks = scale_of(measure, eta, 2), hessian(measure, eta)
    own = blocks.diagonal(dim1=0, dim2=1).movedim(-1, 0).reshape(*eta.shape, measure.dim)
    covariance, vector = measure.covariance(eta), source.normal(*eta.shape)
    close(covariance, own, scale)
    product = (own @ vector.unsqueeze(-1)).squeeze(-1)
    close(measure.covariance_product(eta, vector), product, scale * longest(vector))

    close(covariance, covariance.mT, scale)
    smallest = torch.linalg.eigvalsh(covariance)[..., 0]
    assert bool((smallest >= -TOLERANCE[eta.dtype] * scale).all())


@pytest.mark.parametrize("name", NAMES)
def test_queries_do_not_look_at_each_other(name):
    measure, eta, _ = case(name)
    blocks = hessian(measure, eta)
    across = ~torch.eye(blocks.shape[0], dtype=torch.bool)
    assert bool((blocks[across] == 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_in_float32(name):
    measure, eta, source = case(name, dtype=torch.float32)
    own = hessian(measure, eta).diagonal(dim1=0, dim2=1).movedim(-1, 0).reshape(*eta.shape, measure.dim)
    vector = source.normal(*eta.shape)
    scale = scale_of(measure, eta, 2)
    close(measure.covariance(eta), own, scale)
    product = (own @ vector.unsqueeze(-1)).squeeze(-1)
    close(measure.covariance_product(eta, vector), product, scale * longest(vector))
