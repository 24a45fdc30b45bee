"""Networks of spins and their machines say which weights, states and sizes they cannot take."""

import torch

from gradlogz import Empirical
from gradlogz.dynamics import (
    Ising,
    boltzmann_machine,
    contrastive_divergence,
    exact_gradient,
    fit_machine,
    gaussian_machine,
    hebbian,
    spin_corners,
    visible_distribution,
    visible_log_likelihood,
)
from gradlogz.measures import Gibbs
from support.error_form import each_of, refused

F64 = torch.float64
pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
zero = torch.zeros(2, dtype=F64)
net = Ising(pair, zero)
point = Empirical(zero.unsqueeze(0))
machine, spins = boltzmann_machine(pair, zero, zero), 1 + torch.zeros(3, 2, dtype=F64)

ERRORS = [
    (
        TypeError,
        "contrastive_divergence: machine",
        "hidden",
        lambda: contrastive_divergence(Gibbs(point, point), spins),
    ),
    (ValueError, "contrastive_divergence: data", "[n, d=2]", lambda: contrastive_divergence(machine, spins[:, :1])),
    (
        ValueError,
        "contrastive_divergence: start",
        "-1",
        lambda: contrastive_divergence(machine, spins, start=0 * spins),
    ),
    (ValueError, "contrastive_divergence: steps", "at least", lambda: contrastive_divergence(machine, spins, steps=0)),
    (ValueError, "exact_gradient: steps", "hidden", lambda: exact_gradient(gaussian_machine(pair), spins, steps=2)),
    (ValueError, "visible_log_likelihood: data", "-1", lambda: visible_log_likelihood(machine, 2 * spins)),
    (ValueError, "fit_machine: updates", "at least", lambda: fit_machine(machine, spins, updates=0)),
    (
        ValueError,
        "fit_machine: updates",
        "persistent",
        lambda: fit_machine(machine, spins, updates=1, steps=None, persistent=True),
    ),
    (
        ValueError,
        "Ising: weights",
        "bias",
        lambda: Ising(pair, torch.zeros(3, dtype=F64)),
    ),
    (
        ValueError,
        "Ising: weights",
        "symmetric",
        lambda: Ising(torch.eye(2, dtype=F64), zero),
    ),
    (
        ValueError,
        "Ising.energy: state",
        "shape",
        lambda: net.energy(torch.ones(3, dtype=F64)),
    ),
    (ValueError, "Ising.settle: state", "-1", lambda: net.settle(zero)),
    (
        ValueError,
        "Ising.settle: order",
        "asynchronous",
        lambda: net.settle(1 + zero, order="random"),
    ),
    (
        RuntimeError,
        "Ising.settle: max_iterations",
        "converge",
        lambda: net.settle(torch.tensor([1.0, -1.0], dtype=F64), order="synchronous"),
    ),
    (ValueError, "spin_corners: dim", "from", lambda: spin_corners(21)),
    (ValueError, "hebbian: patterns", "bias", lambda: hebbian(zero)),
    (
        ValueError,
        "gaussian_machine: patterns",
        "bias",
        lambda: gaussian_machine(pair, torch.zeros(3, dtype=F64)),
    ),
    (
        ValueError,
        "boltzmann_machine: weights",
        "hidden_bias",
        lambda: boltzmann_machine(pair, torch.zeros(3, dtype=F64), zero),
    ),
    (
        TypeError,
        "visible_distribution: machine",
        "Spins",
        lambda: visible_distribution(Gibbs(point, point)),
    ),
]


@each_of(ERRORS)
def test_what_cannot_be_is_refused(refusal):
    refused(refusal)
