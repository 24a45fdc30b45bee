"""From continuous time to steps: linear systems and Markov chains that are looked at now and then.

    dx = A x dt + dW, W of spectral density C:    F = exp(A dt),   Q = ∫_0^dt exp(A u) C exp(A u)^T du      [vanloan78]
    a chain that leaves i for j at rate G_ij:     P(dt) = exp(G dt)

Both are those of a short step, by Taylor's series, doubled again and again: F(2h) = F(h)², Q(2h) = F(h) Q(h) F(h)^T +
Q(h). What is carried is F - I, which keeps the digits of short steps. A step of length 0 moves nothing.

Read next: model.py (SwitchingModel with rate=), motion.py (the usual models of motion).
"""

import math

import torch

from .._errors import has_values
from .._typing import Float, Tensor

DOUBLINGS, TERMS = 16, 18  # of steps up to 65536 times the fastest time of A, or more if seen; 1/18! is 2e-16


def discretize(
    drift: Float[Tensor, "*#t s s"], density: Float[Tensor, "*#t s s"], dt: Float[Tensor, "*#t"]
) -> tuple[Float[Tensor, "*#t s s"], Float[Tensor, "*#t s s"]]:
    """F = exp(A dt) and Q = ∫_0^dt exp(A u) C exp(A u)^T du.   [vanloan78]

        exp([[A, C], [0, -A^T]] h) = [[F_h, Q_h F_h^-T], [0, F_h^-T]],     Q_2h = F_h Q_h F_h^T + Q_h

    The first for a step so short that F^-T is harmless, the second, doubling, for the rest of the way.

    >>> import torch
    >>> A, C = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 3.0]])
    >>> discretize(A, C, torch.tensor(2.0))
    (tensor([[1., 2.],
            [0., 1.]]), tensor([[8., 6.],
            [6., 6.]]))
    """
    A, C = torch.broadcast_tensors(drift, density)  # Shorthand
    doublings = _doublings(A, dt)
    h = dt[..., None, None] / 2**doublings
    s = A.shape[-1]
    block = torch.cat((torch.cat((A, C), -1), torch.cat((torch.zeros_like(A), -A.mT), -1)), -2)
    whole = _less_one(h * block)
    E, eye = whole[..., :s, :s], torch.eye(s, dtype=A.dtype, device=A.device)
    Q = whole[..., :s, s:] @ (eye + E).mT
    for _ in range(doublings):
        F = eye + E
        E, Q = 2 * E + E @ E, F @ Q @ F.mT + Q
    return eye + E, (Q + Q.mT) / 2


def discretize_chain(rate: Float[Tensor, "*#t k k"], dt: Float[Tensor, "*#t"]) -> Float[Tensor, "*#t k k"]:
    """P(dt) = exp(G dt): where a chain is that leaves mode i for mode j at rate G_ij, a time dt later.

    Rows of G sum to zero, those of P to one. P(s) P(t) = P(s + t); what cannot be reached has probability 0.

    >>> import torch
    >>> P = discretize_chain(torch.tensor([[-0.5, 0.5], [0.0, 0.0]]), torch.tensor(2.0))
    >>> torch.allclose(P, torch.tensor([[0.3679, 0.6321], [0.0, 1.0]]), atol=1e-4)  # exp(-1), and 0 stays 0
    True
    """
    doublings = _doublings(rate, dt)
    E = _less_one(rate * (dt[..., None, None] / 2**doublings))
    for _ in range(doublings):
        E = 2 * E + E @ E
    P = (torch.eye(rate.shape[-1], dtype=rate.dtype, device=rate.device) + E).clamp(min=0)
    return P / P.sum(-1, keepdim=True)


def _doublings(A: Tensor, dt: Tensor) -> int:
    """How often a short step is doubled: more often for long ones, where numbers can be looked at without waiting."""
    if A.device.type != "cpu" or not has_values(A, dt) or dt.numel() == 0:
        return DOUBLINGS
    longest = float(A.detach().abs().sum(-1).amax() * dt.detach().abs().amax())
    return math.ceil(math.log2(longest)) if 2**DOUBLINGS < longest < math.inf else DOUBLINGS


def _less_one(matrix: Float[Tensor, "*t s s"]) -> Float[Tensor, "*t s s"]:
    """exp(A) - I of a small matrix. torch.linalg.matrix_exp is not as accurate: its errors reach 1e-10 here."""
    term = total = matrix
    for n in range(2, TERMS):
        term = term @ matrix / n
        total = total + term
    return total
