"""The compiled discretisation of many steps is that of the torch path, and of scipy's matrix exponential."""

import numpy
import pytest
import scipy.linalg
import torch

from gradlogz.filters import constant_acceleration, constant_velocity, coordinated_turn, singer
from gradlogz.filters.models.discretization import discretize, discretize_chain
from support.scales import close

compiled = pytest.importorskip("gradlogz.kernels.filters.discretization", reason="needs numba")

F64 = torch.float64
NOISE = {"observation_variance": 1.0, "dtype": F64}
SYSTEMS = {
    "integrators of order 2": constant_velocity(2, spectral_density=0.3, **NOISE),
    "integrators of order 3": constant_acceleration(3, spectral_density=2.0, **NOISE),
    "correlated acceleration": singer(2, correlation_time=5.0, acceleration_variance=0.4, **NOISE),
    "turn": coordinated_turn(2, rate=0.2, spectral_density=0.1, **NOISE),
}
STEPS = torch.tensor([0.0, 1e-9, 1e-3, 0.4, 0.51, 1.0, 3.0, 17.0, 100.0] * 3, dtype=F64)  # more than one group


def random_system(seed: int, s: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    A, L = torch.randn(2, s, s, dtype=F64, generator=generator) / s
    C = L @ L.mT
    A[2], A[:, 2], C[2], C[:, 2] = 0, 0, 0, 0  # a component that never changes
    return A, C


@pytest.mark.parametrize("name", [*SYSTEMS, "random"])
def test_systems_are_those_of_torch(name):
    A, C = random_system(0) if name == "random" else SYSTEMS[name][:2]
    steps = STEPS[STEPS < 20]
    F, Q = compiled.discretize(A[None], C[None], steps)
    for i, dt in enumerate(steps):
        expected = discretize(A, C, dt)
        for actual, wanted in zip((F[i, 0], Q[i, 0]), expected, strict=True):
            close(actual, wanted, scale=float(wanted.abs().max()) + 1e-300)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dt", [1e-3, 0.7, 4.0])
def test_systems_are_those_of_van_loan(seed, dt):
    A, C = random_system(seed)
    F, Q = compiled.discretize(A[None], C[None], torch.tensor([dt], dtype=F64))
    a, c = A.numpy(), C.numpy()
    block = scipy.linalg.expm(numpy.block([[-a, c], [numpy.zeros_like(a), a.T]]) * dt)
    drift = block[5:, 5:].T
    close(F[0, 0], torch.from_numpy(drift.copy()), scale=float(numpy.abs(drift).max()))
    close(Q[0, 0], torch.from_numpy(drift @ block[:5, 5:]), scale=10 * float(C.abs().max()))


def test_several_systems_and_steps_are_each_pair():
    A, C = (torch.stack(parts) for parts in zip(*(random_system(seed) for seed in range(3)), strict=True))
    F, Q = compiled.discretize(A, C, STEPS[:7])
    for j in range(3):
        for i in range(7):
            F_one, Q_one = compiled.discretize(A[j : j + 1], C[j : j + 1], STEPS[i : i + 1])
            close(F[i, j], F_one[0, 0], scale=float(F_one.abs().max()))
            close(Q[i, j], Q_one[0, 0], scale=float(Q_one.abs().max()) + 1e-300)


def test_chains_are_those_of_torch_and_scipy():
    rate = torch.tensor([[-0.3, 0.2, 0.1], [0.0, 0.0, 0.0], [2.0, 0.0, -2.0]], dtype=F64)
    P = compiled.discretize_chain(rate, STEPS)
    close(P, discretize_chain(rate, STEPS), scale=1.0)
    for i, dt in enumerate(STEPS.tolist()):
        close(P[i], torch.from_numpy(scipy.linalg.expm(rate.numpy() * dt)), scale=1.0)
    assert bool((P[:, 1, :2] == torch.tensor([0.0, 1.0])).all())  # unreachable modes have probability 0
    close(P.sum(-1), torch.ones(len(STEPS), 3, dtype=F64), scale=1.0)
