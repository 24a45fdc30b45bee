"""Networks of spins and their machines say which weights, states and sizes they cannot take."""

import torch

from gradlogz import Empirical
from gradlogz.dynamics import Ising, boltzmann_machine, gaussian_machine, hebbian, spin_corners, visible_law
from gradlogz.measures import Gibbs
from support.error_form import each_of, refused

F64 = torch.float64
pair = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=F64)
zero = torch.zeros(2, dtype=F64)
net = Ising(pair, zero)
point = Empirical(zero.unsqueeze(0))

ERRORS = [
    (
        ValueError,
        "Ising: weights and bias must be [d, d] and [d]; got (2, 2) and (3,).",
        lambda: Ising(pair, torch.zeros(3, dtype=F64)),
    ),
    (
        ValueError,
        "Ising: weights must be symmetric and 0 on the diagonal; got others.",
        lambda: Ising(torch.eye(2, dtype=F64), zero),
    ),
    (
        ValueError,
        "Ising.energy: states must end in d=2; got shape (3,).",
        lambda: net.energy(torch.ones(3, dtype=F64)),
    ),
    (ValueError, "Ising.settle: state must be of -1 and 1; got others.", lambda: net.settle(zero)),
    (
        ValueError,
        'Ising.settle: order must be "asynchronous" or "synchronous"; got \'random\'.',
        lambda: net.settle(1 + zero, order="random"),
    ),
    (
        RuntimeError,
        "Ising.settle: every state must come to rest; got 1 of 1 states that still turn after 100 rounds.",
        lambda: net.settle(torch.tensor([1.0, -1.0], dtype=F64), order="synchronous"),
    ),
    (ValueError, "spin_corners: dim must be from 1 to 20; got 21.", lambda: spin_corners(21)),
    (ValueError, "hebbian: patterns must be [n, d] and bias [d]; got (2,).", lambda: hebbian(zero)),
    (
        ValueError,
        "gaussian_machine: patterns must be [n, d] and bias [d]; got (2, 2) and (3,).",
        lambda: gaussian_machine(pair, torch.zeros(3, dtype=F64)),
    ),
    (
        ValueError,
        "boltzmann_machine: weights and biases must be [d, e], [d] and [e]; got (2, 2), (3,) and (2,).",
        lambda: boltzmann_machine(pair, torch.zeros(3, dtype=F64), zero),
    ),
    (
        TypeError,
        "visible_law: machine must have one set of spins on its first side; got Empirical.",
        lambda: visible_law(Gibbs(point, point)),
    ),
]


@each_of(ERRORS)
def test_what_cannot_be_is_refused(refusal):
    refused(refusal)
