"""The fused kernels give an empirical measure of many points what the definition gives it: values and derivatives."""

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from gradlogz import Empirical
from gradlogz.measures import empirical
from support.scales import close

SHAPES = {
    "one batch": ((7, 3), None),
    "weights": ((7, 3), (7,)),
    "weights per query": ((7, 3), (4, 7)),
    "a batch": ((2, 7, 3), (1, 7)),
    "a batch of batches": ((2, 1, 7, 3), (2, 3, 4, 7)),
}


def measures(shape):
    points_shape, weights_shape = SHAPES[shape]
    points = torch.randn(points_shape, dtype=torch.float64) + 5.0
    log_weights = None if weights_shape is None else torch.randn(weights_shape, dtype=torch.float64)
    if log_weights is not None:
        log_weights[..., 2] = -torch.inf
    batch = Empirical(points, log_weights).batch_shape
    return points, log_weights, torch.randn(*batch, 4, 3, dtype=torch.float64)


STATISTICS = {
    "log_normalizer": lambda h, eta: h.log_normalizer(eta),
    "mean": lambda h, eta: h.mean(eta),
    "entropy": lambda h, eta: h.entropy(eta),
    "covariance_product": lambda h, eta: h.covariance_product(eta, eta.detach().cos()),
    "third_cumulant": lambda h, eta: h.third_cumulant(eta, eta.detach().cos(), eta.detach().sin()),
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_derivatives_are_those_of_the_definition(shape, statistic, monkeypatch):
    points, log_weights, eta = measures(shape)

    def found():
        h = Empirical(points, log_weights)
        function = STATISTICS[statistic]
        yield function(h, eta)
        yield grad(lambda e: function(h, e).sin().sum())(eta)
        yield grad(lambda x: function(Empirical(x, log_weights, validate=False), eta).sin().sum())(points)
        yield jvp(lambda e: function(h, e), (eta,), (torch.ones_like(eta),))[1]
        if statistic != "third_cumulant":
            yield hessian(lambda e: function(h, e).sin().sum())(eta)
            yield vmap(lambda e: function(h, e))(torch.stack([eta, -eta]))

    expected = list(found())
    monkeypatch.setattr(empirical, "MANY", 0)
    for actual, value in zip(found(), expected, strict=True):
        close(actual, value, 100.0)


def test_it_compiles(monkeypatch):
    monkeypatch.setattr(empirical, "MANY", 0)
    points, log_weights, eta = measures("weights")
    for function in STATISTICS.values():
        torch._dynamo.reset()
        h = Empirical(points, log_weights)
        compiled = torch.compile(lambda e, f=function, h=h: f(h, e), fullgraph=True, backend="aot_eager")
        close(compiled(eta), function(h, eta), 100.0)


def test_memory_is_linear():
    """20000 points and queries: their logits would be 3 GiB."""
    points = torch.randn(20000, 4)
    h = Empirical(points)
    with torch.profiler.profile(profile_memory=True) as profile:
        h.mean(points[:20000])
    made = [event.cpu_memory_usage for event in profile.events() if event.name == "aten::empty"]
    assert 0 < max(made) < 1 << 26


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_saturated_rows_keep_their_relative_digits(dtype, monkeypatch):
    """One key has nearly all the weight: the covariance is small, and known as well as it is by definition."""
    points, eta = torch.randn(200, 8, dtype=dtype), 20 * torch.randn(50, 8, dtype=dtype)
    few = Empirical(points.double()).covariance_product(eta.double(), eta.double().cos())
    monkeypatch.setattr(empirical, "MANY", 0)
    many = Empirical(points).covariance_product(eta, eta.cos())
    error = (many.double() - few).norm(dim=-1) / few.norm(dim=-1)
    assert float(error.median()) < (1e-4 if dtype == torch.float32 else 1e-12)
