"""Classical Hopfield networks: spins whose energy is a quadratic form, and the machines that are the same.

    E(x)      = -<x, W x>/2 - <b, x>,  x in {-1, 1}^d           W symmetric, 0 on the diagonal              [hopfield82]
    W         = sum_n x_n x_n^T / d, but for the diagonal       Hebb's rule: patterns stored in weights
    x_a'      = sign (W x + b)_a                                one by one: E never rises; at once: cycles of two states
    m'        = tanh(beta (W m + b))                            mean field: the mean of the cube, the field as the query
    exp(<x, A A^T x>/2) = E exp<A^T x, z>,  z ~ N(0, I)         hidden Gaussians for the quadratic form        [barra12]
    p(x, y)   ~ exp(<x, W y> + <a, x> + <c, y>)                 spins on both sides: a restricted Boltzmann machine

The corners of the cube are 2^d keys, and `Spins` is their measure: G = sum log cosh, ∇G = tanh. Modern networks have
the log normaliser of patterns in their energy, these have the one of spins in their mean field. The machines are Gibbs
pairs of spins and another measure, whose chains are their samplers.

Read next: hopfield.py (modern networks), ../measures/gibbs.py (the chain), ../measures/exponential.py (`Spins`).
"""

import math
from dataclasses import dataclass
from typing import Literal, Unpack

import torch

from .._errors import InputRuntimeError, InputTypeError, InputValueError, check_floats, present, shape_of
from .._typing import Float, Tensor
from ..measures.algebra import pushforward
from ..measures.empirical import Empirical
from ..measures.exponential import Spins
from ..measures.gaussian import Gaussian
from ..measures.gibbs import Gibbs
from .fixed_points import Equilibrium, EquilibriumOptions, equilibrium
from .hopfield import Retrieval

MOST = 20  # spins whose corners are written down


@dataclass(frozen=True)
class Ising:
    """Spins x in {-1, 1}^d of energy -<x, W x>/2 - <b, x>, and their law exp(-beta E).

    Law: tests/laws/test_spins_fall_to_rest.py.

    >>> import torch
    >>> patterns = torch.randn(3, 100, dtype=torch.float64).sign()
    >>> network = hebbian(patterns)
    >>> start = patterns.clone()
    >>> start[:, :10] *= -1
    >>> torch.equal(network.settle(start).state, patterns)
    True
    """

    weights: Float[Tensor, "d d"]
    bias: Float[Tensor, " d"]

    def __post_init__(self) -> None:
        W, b = self.weights, self.bias
        check_floats("Ising", weights=W, bias=b)
        if b.ndim != 1 or W.shape != (len(b), len(b)):
            fact, remedy = f"{shape_of(W)} and {shape_of(b)}", "Without fields pass a bias of zeros."
            raise InputValueError("Ising", "weights", f"weights and bias must be [d, d] and [d], got {fact}", remedy)
        if not torch.equal(W, W.mT) or bool((W.diagonal() != 0).any()):
            remedy = "Pass (W + W.mT) / 2; the diagonal adds a constant to the energy."
            condition, fact = "weights must be symmetric and 0 on the diagonal", "others"
            raise InputValueError("Ising", "weights", f"{condition}, got {fact}", remedy)

    def energy(self, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """-<x, W x>/2 - <b, x>; of a mean m, the mean energy of independent spins."""
        self._check("energy", state)
        return -(state * (state @ self.weights / 2 + self.bias)).sum(-1)

    def settle(
        self,
        state: Float[Tensor, "*b d"],
        *,
        order: Literal["asynchronous", "synchronous"] = "asynchronous",
        max_iterations: int = 100,
        throw: bool = True,
    ) -> Retrieval:
        """Turn spins along their fields until none turns; a spin in no field stays.

        Args:
            order: "asynchronous" goes through the spins one by one, which never raises the energy and always ends;
                "synchronous" turns all at once, which may end in a cycle of two states.
            max_iterations: rounds through all spins, at most.
        """
        self._check("settle", state)
        if bool((state.abs() != 1).any()):
            remedy = "Take state.sign() of a state without zeros."
            raise InputValueError("Ising.settle", "state", "state must be of -1 and 1, got others", remedy)
        if order not in ("asynchronous", "synchronous"):
            condition, remedy = 'order must be "asynchronous" or "synchronous"', "One by one always ends."
            raise InputValueError("Ising.settle", "order", f"{condition}, got {order!r}", remedy)
        x = state.clone()
        resting = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
        taken = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        for _ in range(max_iterations):
            y = self._swept(x) if order == "asynchronous" else _along(x @ self.weights + self.bias, x)
            taken = taken + (~resting).long()
            resting = resting | (y == x).all(-1)
            x = y
            if bool(resting.all()):
                break
        if throw and not bool(resting.all()):
            fact = f"{int((~resting).sum())} of {resting.numel()} states that still turn after {max_iterations} rounds"
            remedy = "Turn them one by one, raise max_iterations, or pass throw=False and look at converged."
            raise InputRuntimeError("Ising.settle", None, f"every state must come to rest, got {fact}", remedy)
        return Retrieval(x, resting, taken)

    def mean_field(
        self, mean: Float[Tensor, "*b d"], *, beta: float = 1.0, **options: Unpack[EquilibriumOptions]
    ) -> Equilibrium:
        """Means m = tanh(beta (W m + b)) of independent spins, from a start; `options` are those of `equilibrium`.

        They are the stationary points of `bound`. Differentiable with respect to weights and bias.
        """
        self._check("mean_field", mean)
        cube = Spins(beta * self.bias)
        return equilibrium(lambda m: cube.mean(beta * (m @ self.weights)), mean, **options)

    def bound(self, mean: Float[Tensor, "*b d"], *, beta: float = 1.0) -> Float[Tensor, "*b"]:
        """Entropy minus beta times energy of independent spins with these means: at most the log mass of the law."""
        up = (1 + mean) / 2
        entropy = -(torch.xlogy(up, up) + torch.xlogy(1 - up, 1 - up)).sum(-1)
        return entropy - beta * self.energy(mean)

    def exact(self, *, beta: float = 1.0) -> Empirical:
        """The law itself, as a measure on the 2^d corners of weights exp(-beta E).

        Its log normaliser at 0 is the log mass, its mean at 0 the magnetisation, and at eta that in one more field.
        """
        points = spin_corners(len(self.bias), like=self.bias)
        return Empirical(points, -beta * self.energy(points))

    def _swept(self, state: Tensor) -> Tensor:
        """All spins turned one after the other, each in the field of those before it."""
        x, field = state.clone(), state @ self.weights + self.bias
        for a in range(x.shape[-1]):
            turned = _along(field[..., a], x[..., a])
            field = field + (turned - x[..., a]).unsqueeze(-1) * self.weights[a]
            x[..., a] = turned
        return x

    def _check(self, name: str, state: Tensor) -> None:
        check_floats(f"Ising.{name}", state=state, bias=self.bias)
        if state.ndim == 0 or state.shape[-1] != len(self.bias):
            condition = f"states must end in d={len(self.bias)}"
            remedy = "One number for each spin."
            raise InputValueError(f"Ising.{name}", "states", f"{condition}, got shape {shape_of(state)}", remedy)


def hebbian(patterns: Float[Tensor, "n d"], bias: Float[Tensor, " d"] | None = None) -> Ising:
    """Patterns stored in weights: W = sum_n x_n x_n^T / d without its diagonal.

    The energy is n/2 - sum_n <x_n, x>² / 2d: quadratic in the overlaps where that of `hopfield_energy` is exponential,
    so that about 0.14 d random patterns find room [amit85], and not exponentially many.
    """
    _check_patterns("hebbian", patterns, bias)
    W = patterns.mT @ patterns / patterns.shape[-1]
    W = (W + W.mT) / 2  # products of matrices are symmetric but for rounding
    return Ising(W - torch.diag(W.diagonal()), patterns.new_zeros(patterns.shape[-1]) if bias is None else bias)


def gaussian_machine(
    patterns: Float[Tensor, "n d"], bias: Float[Tensor, " d"] | None = None, *, beta: float = 1.0
) -> Gibbs:
    """The network of `hebbian` as spins and one hidden Gaussian a pattern, which see each other alone.

        exp(beta <x, X^T X x> / 2d) = ∫ exp(sqrt(beta / d) <X x, z>) dN(0, I)(z)        [Hubbard-Stratonovich] [barra12]

    Summing the Gaussians out leaves exp(-beta E) exactly. The chain of the pair draws all spins at once, then all
    Gaussians: x of the chain are the spins, eta their fields.
    """
    _check_patterns("gaussian_machine", patterns, bias)
    n, d = patterns.shape
    hidden = Gaussian.diagonal(patterns.new_zeros(n), patterns.new_ones(n))
    field = patterns.new_zeros(d) if bias is None else beta * bias
    return Gibbs(Spins(field), pushforward(hidden, math.sqrt(beta / d) * patterns.mT))


def boltzmann_machine(
    weights: Float[Tensor, "d e"], visible_bias: Float[Tensor, " d"], hidden_bias: Float[Tensor, " e"]
) -> Gibbs:
    """Spins on both sides, p(x, y) ~ exp(<x, W y> + <a, x> + <c, y>): a restricted Boltzmann machine.

    Two cubes that are each other's keys and queries: x given y is independent with means tanh(a + W y), and likewise y.
    x of the chain are the visible spins, eta = W y their fields.

    >>> import torch
    >>> machine = boltzmann_machine(torch.randn(3, 2), torch.zeros(3), torch.zeros(2))
    >>> machine.chain(torch.zeros(100, 3), 10).x.abs().unique()
    tensor([1.])
    """
    check_floats("boltzmann_machine", weights=weights, visible_bias=visible_bias, hidden_bias=hidden_bias)
    if weights.ndim != 2 or weights.shape != visible_bias.shape + hidden_bias.shape:
        fact = f"{shape_of(weights)}, {shape_of(visible_bias)} and {shape_of(hidden_bias)}"
        condition = "weights and biases must be [d, e], [d] and [e]"
        remedy = "One row for each visible spin."
        raise InputValueError("boltzmann_machine", "weights", f"{condition}, got {fact}", remedy)
    return Gibbs(Spins(visible_bias), pushforward(Spins(hidden_bias), weights))


def visible_law(machine: Gibbs) -> Empirical:
    """The exact law of the spins of a machine, the hidden side summed out: weights exp<a, x> Z_g(x) on the corners."""
    if not isinstance(machine.h, Spins) or machine.h.bias.ndim != 1:
        remedy = "Make it with boltzmann_machine or gaussian_machine."
        condition = "machine must have one set of spins on its first side"
        raise InputTypeError("visible_law", "machine", f"{condition}, got {type(machine.h).__name__}", remedy)
    points = spin_corners(machine.h.dim, like=machine.h.bias)
    return Empirical(points, points @ machine.h.bias + machine.g.log_normalizer(points))


def spin_corners(dim: int, *, like: Float[Tensor, "..."] | None = None) -> Float[Tensor, "n d"]:
    """All 2^d states of d spins, in the dtype and on the device of `like`.

    >>> spin_corners(2).tolist()
    [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """
    if not 1 <= dim <= MOST:
        remedy = "Draw from a machine's chain instead, or use the mean field."
        raise InputValueError("spin_corners", "dim", f"dim must be from 1 to {MOST}, got {dim}", remedy)
    of = torch.zeros(()) if like is None else like
    index = torch.arange(2**dim, device=of.device).unsqueeze(-1)
    bits = (index >> torch.arange(dim - 1, -1, -1, device=of.device)) & 1
    return 2 * bits.to(of.dtype) - 1


def _along(field: Tensor, spins: Tensor) -> Tensor:
    return torch.where(field == 0, spins, field.sign())


def _check_patterns(call: str, patterns: Tensor, bias: Tensor | None) -> None:
    check_floats(call, patterns=patterns, **present(bias=bias))
    if patterns.ndim != 2 or patterns.numel() == 0 or (bias is not None and bias.shape != patterns.shape[1:]):
        fact = shape_of(patterns) if bias is None else f"{shape_of(patterns)} and {shape_of(bias)}"
        condition, remedy = "patterns must be [n, d] and bias [d]", "One pattern a row."
        raise InputValueError(call, "patterns", f"{condition}, got {fact}", remedy)
