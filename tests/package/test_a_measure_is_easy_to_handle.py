"""A measure prints its shapes, moves to another dtype, and survives copying and pickling."""

import copy
import io
import pickle

import pytest
import torch

import gradlogz as gz
from support.measure_registry import NAMES, case


def test_a_measure_prints_shapes_and_not_numbers():
    h = gz.Mixture(torch.zeros(1), gz.Gaussian(torch.zeros(1, 2), torch.eye(2).expand(1, 2, 2)))
    inner = "Gaussian(loc=float32[1, 2], covariance_matrix=float32[1, 2, 2])"
    assert repr(h) == f"Mixture(log_weights=float32[1], components={inner})"
    assert repr(gz.Sphere(3)) == "Sphere(dim=3, radius=float32[])"


@pytest.mark.parametrize("name", NAMES)
def test_a_measure_moves_to_another_dtype(name):
    measure, eta, _ = case(name)
    mean = measure.to(torch.float32).mean(eta.float())
    assert mean.dtype == torch.float32
    assert torch.allclose(
        mean.double(), measure.mean(eta), rtol=1e-3, atol=1e-3 * float(1 + measure.mean(eta).abs().max())
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_measure_can_be_copied_and_pickled(name):
    measure, eta, _ = case(name)
    buffer = io.BytesIO()
    torch.save(measure, buffer)
    buffer.seek(0)
    twins = copy.deepcopy(measure), pickle.loads(pickle.dumps(measure)), torch.load(buffer, weights_only=False)
    for twin in twins:
        assert torch.equal(twin.mean(eta), measure.mean(eta))


def test_a_measure_is_frozen():
    with pytest.raises(AttributeError):
        gz.Spins(torch.zeros(2)).bias = torch.ones(2)
