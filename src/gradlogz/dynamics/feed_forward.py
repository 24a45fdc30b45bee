"""Feed-forward layers with an energy: one matrix, used twice.

    y(x) = W^T f(W x + b)                            two layers of a network with tied weights             [krotov16]
    E(x) = |x|²/2 - sum_a F(<w_a, x> + b_a)          F' = f: y is the gradient of the sum of potentials
    x'   = (1 - s) x + s y(x)                        lowers E by at least s (1 - s (1 + c |W|²) / 2) |x - y|²

    f              F                       slopes of f      the network
    identity       u²/2                    1                classical: linear attention to the rows of W
    relu           relu(u)²/2              0 to 1
    relu_squared   relu(u)³/3              0 to infinity    dense associative memory of order 3           [krotov16]
    tanh           log cosh u              0 to 1           hidden spins, summed out
    sigmoid        log(1 + exp u)          0 to 1/4         hidden bits, summed out: a Boltzmann machine
    gelu           (u² - 1) Phi/2 + u phi/2   -0.13 to 1.13
    softmax        log sum_a exp u_a       0 to 1/2         modern network: attention to the rows of W    [ramsauer20]

c is 0 if f is monotone, so that F is convex; otherwise minus its smallest slope. The proof is that of theory 5.6: -F
lies below its tangent plus c |W|² |x' - x|² / 2.

Read next: hopfield.py (softmax, iterated), ising.py (identity, on spins), block_energy.py (attention and this layer).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import gelu, softplus

from .._errors import InputValueError, shape_of
from .._typing import Float, Tensor


class Potential(NamedTuple):
    """An activation f, its potential F summed over the hidden units, and the smallest and largest slope of f."""

    activation: Callable[[Tensor], Tensor]
    potential: Callable[[Tensor], Tensor]
    smallest_slope: float
    largest_slope: float


def _gelu_potential(u: Tensor) -> Tensor:
    """((u² - 1) Phi(u) + u phi(u)) / 2, the integral of u Phi(u)."""
    Phi = torch.special.ndtr(u)
    phi = torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)
    return (((u.square() - 1) * Phi + u * phi) / 2).sum(-1)


# The slope Phi(u) + u phi(u) of gelu is extreme at u = sqrt(2) and -sqrt(2).
STEEPEST_GELU = (1 + math.erf(1.0)) / 2 + math.exp(-1.0) / math.sqrt(math.pi)

POTENTIALS: dict[str, Potential] = {
    "identity": Potential(lambda u: u, lambda u: u.square().sum(-1) / 2, 1.0, 1.0),
    "relu": Potential(torch.relu, lambda u: torch.relu(u).square().sum(-1) / 2, 0.0, 1.0),
    "relu_squared": Potential(
        lambda u: torch.relu(u).square(), lambda u: torch.relu(u).pow(3).sum(-1) / 3, 0.0, math.inf
    ),
    "tanh": Potential(torch.tanh, lambda u: (u.abs() + softplus(-2 * u.abs()) - math.log(2)).sum(-1), 0.0, 1.0),
    "sigmoid": Potential(torch.sigmoid, lambda u: softplus(u, threshold=40.0).sum(-1), 0.0, 0.25),
    "gelu": Potential(gelu, _gelu_potential, 1 - STEEPEST_GELU, STEEPEST_GELU),
    "softmax": Potential(lambda u: u.softmax(-1), lambda u: u.logsumexp(-1), 0.0, 0.5),
}


class HopfieldFeedForward(nn.Module):
    """Feed-forward layer W^T f(W x + b), the gradient of a sum of potentials.

    Args:
        embed_dim: size of a token.
        hidden: number of hidden units, the rows of W.
        activation: f: "identity", "relu", "relu_squared", "tanh", "sigmoid", "gelu" or "softmax".
        bias: bias b of the hidden units.

    Law: tests/laws/test_feed_forward_layers_descend.py.

    >>> import torch
    >>> layer, x = HopfieldFeedForward(6, 20, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    >>> gradient = torch.func.grad(lambda x: layer.energy(x).sum())(x)
    >>> torch.allclose(x - layer(x), gradient)
    True
    >>> bool((layer.energy(layer.step(x, damping=0.5)) <= layer.energy(x)).all())
    True
    """

    def __init__(
        self,
        embed_dim: int,
        hidden: int,
        *,
        activation: str = "relu",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in POTENTIALS:
            condition = f"activation must be one of {', '.join(POTENTIALS)}"
            remedy = "Choose one of these, whose potentials are known."
            raise InputValueError("HopfieldFeedForward", "activation", f"{condition}, got {activation!r}", remedy)
        super().__init__()
        self.embed_dim, self.hidden, self.activation = embed_dim, hidden, activation
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.randn(hidden, embed_dim, **options) / math.sqrt(embed_dim))
        self.bias = nn.Parameter(torch.zeros(hidden, **options)) if bias else None

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """W^T f(W x + b), [*b, d]."""
        return POTENTIALS[self.activation].activation(self._fields(x)) @ self.weight

    def potential(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Sum of the potentials F of the hidden units, [*b]; its gradient is the output."""
        return POTENTIALS[self.activation].potential(self._fields(x))

    def energy(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Energy |x|²/2 - sum_a F(<w_a, x> + b_a), [*b]."""
        return x.square().sum(-1) / 2 - self.potential(x)

    def step(self, x: Float[Tensor, "*b d"], *, damping: float = 1.0) -> Float[Tensor, "*b d"]:
        """The update (1 - s) x + s y(x), [*b, d]; a descent of the energy for 0 < s <= 1 if f is monotone."""
        return (1 - damping) * x + damping * self(x)

    def descent(self, x: Float[Tensor, "*b d"], *, damping: float = 1.0) -> Float[Tensor, "*b"]:
        """Lower bound on the decrease of the energy in a step, s (1 - s (1 + c |W|²) / 2) |x - y|², [*b]."""
        factor = damping * (1 - damping * (1 + self.negative_curvature()) / 2)
        return factor * (x - self(x)).square().sum(-1)

    def negative_curvature(self) -> Float[Tensor, ""]:
        """c |W|²: 0 for a monotone activation, else a bound on the negative eigenvalues of the potential's Hessian."""
        c = max(0.0, -POTENTIALS[self.activation].smallest_slope)
        return c * torch.linalg.matrix_norm(self.weight, 2).square()

    def lipschitz(self) -> Float[Tensor, ""]:
        """Lipschitz constant of the layer: the largest slope times |W|²; infinite for relu_squared."""
        kind = POTENTIALS[self.activation]
        return max(kind.largest_slope, -kind.smallest_slope) * torch.linalg.matrix_norm(self.weight, 2).square()

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"{self.embed_dim}, hidden={self.hidden}, activation={self.activation!r}{bias}"

    def _fields(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.embed_dim:
            condition = f"x must be [*b, embed_dim={self.embed_dim}]"
            remedy = "Put the coordinates of a token last."
            raise InputValueError("HopfieldFeedForward", "x", f"{condition}, got shape {shape_of(x)}", remedy)
        return nn.functional.linear(x, self.weight, self.bias)
