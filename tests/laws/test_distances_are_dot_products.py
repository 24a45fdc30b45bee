"""Double centring and classical scaling, against dot products and the singular value decomposition in numpy."""

import numpy as np
import pytest
import torch

from gradlogz.contrastive import classical_scaling, double_centring
from support.scales import close

F64 = torch.float64


def pairs(x):
    """|x_i - x_j|², pair by pair."""
    return torch.tensor(np.array([[((a - b) ** 2).sum() for b in x.numpy()] for a in x.numpy()]))


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_doubly_centred_distances_are_dot_products(shift):
    """-J D J / 2 = X_c X_c^T wherever the points lie, entry by entry."""
    torch.manual_seed(0)
    x = torch.randn(7, 3, dtype=F64) + shift
    centred = (x - x.mean(0)).numpy()
    expected = np.array([[a @ b for b in centred] for a in centred])
    close(double_centring(pairs(x)), torch.tensor(expected), 10.0 * (1 + shift))
    J = torch.eye(7, dtype=F64) - 1 / 7
    close(double_centring(pairs(x)), -J @ pairs(x) @ J / 2, 100.0)
    batch = torch.stack((pairs(x), 4 * pairs(x)))
    close(double_centring(batch)[1], 4 * double_centring(pairs(x)), 100.0)


def test_points_are_their_principal_components():
    torch.manual_seed(1)
    x = torch.randn(9, 4, dtype=F64) @ torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=F64))
    scaled = classical_scaling(pairs(x), 4)
    close(pairs(scaled.points), pairs(x), 100.0)
    U, S, _ = np.linalg.svd((x - x.mean(0)).numpy(), full_matrices=False)
    close(scaled.eigenvalues[:4], torch.tensor(S**2), 100.0)
    close(scaled.eigenvalues[4:], torch.zeros(5, dtype=F64), 100.0)
    close(scaled.points[:, :2].abs(), torch.tensor(np.abs(U * S)[:, :2]), 100.0)
    close(classical_scaling(pairs(x), 2).points, scaled.points[:, :2], 100.0)


def test_distances_that_no_points_have_are_recognised():
    """Three leaves of a star at distance 2 from each other and 1 from the centre: squared, no such points exist."""
    D = torch.tensor([[0.0, 1, 1, 1], [1, 0, 4, 4], [1, 4, 0, 4], [1, 4, 4, 0]], dtype=F64)
    assert float(classical_scaling(D, 3).eigenvalues[-1]) < -0.1


def test_a_softmax_of_distances_is_one_of_dot_products():
    """exp(-|x_i - x_j|²) and exp(2 <x_i, x_j> - |x_j|²), with centred dot products from the distances alone."""
    torch.manual_seed(2)
    x = torch.randn(6, 3, dtype=F64)
    gram = double_centring(pairs(x))
    close((2 * gram - gram.diagonal()).softmax(-1), (-pairs(x)).softmax(-1), 10.0)
