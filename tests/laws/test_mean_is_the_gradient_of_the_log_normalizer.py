"""The mean is the gradient of the log normaliser, for every measure.   [shim22, Eq. 4]"""

import pytest
import torch
from hypothesis import given

from support.measure_registry import NAMES, case, magnitudes, query_shapes, seeds
from support.scales import close, scale_of


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, queries=query_shapes, magnitude=magnitudes)
def test_mean_is_the_gradient_of_the_log_normalizer(name, seed, queries, magnitude):
    measure, eta, _ = case(name, seed, queries=queries, magnitude=magnitude)
    gradient = torch.func.grad(lambda e: measure.log_normalizer(e).sum())(eta)
    close(measure.mean(eta), gradient, scale_of(measure, eta))


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_in_float32(name):
    measure, eta, _ = case(name, dtype=torch.float32)
    gradient = torch.func.grad(lambda e: measure.log_normalizer(e).sum())(eta)
    assert gradient.dtype == torch.float32
    close(measure.mean(eta), gradient, scale_of(measure, eta))
