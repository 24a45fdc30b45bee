"""Classical Hopfield networks (Ising models) and equivalent Boltzmann machines.

    E(x)      = -<x, W x>/2 - <b, x>,  x in {-1, 1}^d           W symmetric, 0 on the diagonal              [hopfield82]
    W         = sum_n x_n x_n^T / d, with zero diagonal         Hebb's rule: patterns stored in weights
    x_a'      = sign (W x + b)_a                                in turn: E never rises; all at once: may cycle
    m'        = tanh(beta (W m + b))                            mean field: attention to the corners of the cube
    exp(<x, A A^T x>/2) = E exp<A^T x, z>,  z ~ N(0, I)         Gaussian hidden units                          [barra12]
    p(x, y)   ~ exp(<x, W y> + <a, x> + <c, y>)                 restricted Boltzmann machine

The corners of the cube are 2^d keys, and `Spins` is their measure: G = sum log cosh, ∇G = tanh. Modern networks have
the log normaliser of the patterns in their energy; classical networks have that of the spins in their mean field. The
machines are `Gibbs` pairs of spins and another measure, sampled by `Gibbs.chain`.

Linear attention to the patterns, with identity features, applies the matrix of Hebb's rule and its diagonal to a query.
Its log normaliser is minus this energy up to the diagonal: quadratic where softmax attention is exponential.

Read next: hopfield.py (modern networks), ../attention/linear.py (these weights as attention), ../measures/gibbs.py (the
chain), ../measures/exponential.py (`Spins`).
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

MOST = 20  # largest number of spins whose states are enumerated


@dataclass(frozen=True)
class Ising:
    """Spins x in {-1, 1}^d with energy E = -<x, W x>/2 - <b, x> and distribution proportional to exp(-beta E).

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
            fact, remedy = f"shapes {shape_of(W)} and {shape_of(b)}", "Pass a bias of zeros for no external field."
            raise InputValueError("Ising", "weights", f"weights and bias must be [d, d] and [d], got {fact}", remedy)
        if not torch.equal(W, W.mT) or bool((W.diagonal() != 0).any()):
            problem = "weights are not symmetric with a zero diagonal"
            remedy = "Pass (W + W.mT) / 2 without its diagonal, which only adds a constant to the energy."
            raise InputValueError("Ising", "weights", problem, remedy)

    def energy(self, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Energy -<x, W x>/2 - <b, x>, [*b]; for a mean m, the mean energy of independent spins."""
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
        """Align spins with their local fields until none changes; a spin in zero field stays.

        Args:
            order: "asynchronous" updates the spins in turn, which never raises the energy and always converges;
                "synchronous" updates all at once and may end in a cycle of two states.
            max_iterations: largest number of sweeps over all spins.
            throw: raise an error if a state does not converge; otherwise see `converged`.
        """
        self._check("settle", state)
        if bool((state.abs() != 1).any()):
            remedy = "Pass state.sign() of a state without zeros."
            raise InputValueError("Ising.settle", "state", "state has entries other than -1 and 1", remedy)
        if order not in ("asynchronous", "synchronous"):
            condition, remedy = (
                'order must be "asynchronous" or "synchronous"',
                "Use asynchronous, which always converges.",
            )
            raise InputValueError("Ising.settle", "order", f"{condition}, got {order!r}", remedy)
        x = state.clone()
        converged = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
        counts = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        for _ in range(max_iterations):
            y = self._swept(x) if order == "asynchronous" else _along(x @ self.weights + self.bias, x)
            counts = counts + (~converged).long()
            converged = converged | (y == x).all(-1)
            x = y
            if bool(converged.all()):
                break
        if throw and not bool(converged.all()):
            failed = f"{int((~converged).sum())} of {converged.numel()} states"
            problem = f"{failed} did not converge within max_iterations={max_iterations}"
            remedy = "Use order='asynchronous', raise max_iterations, or pass throw=False and check converged."
            raise InputRuntimeError("Ising.settle", "max_iterations", problem, remedy)
        return Retrieval(x, converged, counts)

    def mean_field(
        self, mean: Float[Tensor, "*b d"], *, beta: float = 1.0, **options: Unpack[EquilibriumOptions]
    ) -> Equilibrium:
        """Solve the mean-field equations m = tanh(beta (W m + b)) from a start; `options` are those of `equilibrium`.

        Solutions are the stationary points of `bound`. Differentiable with respect to weights and bias.
        """
        self._check("mean_field", mean)
        cube = Spins(beta * self.bias)
        return equilibrium(lambda m: cube.mean(beta * (m @ self.weights)), mean, **options)

    def bound(self, mean: Float[Tensor, "*b d"], *, beta: float = 1.0) -> Float[Tensor, "*b"]:
        """Lower bound on the log partition function: entropy minus beta times energy of independent spins, [*b]."""
        up = (1 + mean) / 2
        entropy = -(torch.xlogy(up, up) + torch.xlogy(1 - up, 1 - up)).sum(-1)
        return entropy - beta * self.energy(mean)

    def exact(self, *, beta: float = 1.0) -> Empirical:
        """The exact distribution as a measure on the 2^d states, with weights exp(-beta E).

        Its log normaliser at 0 is the log partition function and its mean at 0 the magnetisation; eta is an additional
        field.
        """
        points = spin_corners(len(self.bias), like=self.bias)
        return Empirical(points, -beta * self.energy(points))

    def _swept(self, state: Tensor) -> Tensor:
        """One sweep: each spin in turn is aligned with its field, given the spins updated before it."""
        x, field = state.clone(), state @ self.weights + self.bias
        for a in range(x.shape[-1]):
            turned = _along(field[..., a], x[..., a])
            field = field + (turned - x[..., a]).unsqueeze(-1) * self.weights[a]
            x[..., a] = turned
        return x

    def _check(self, name: str, state: Tensor) -> None:
        check_floats(f"Ising.{name}", state=state, bias=self.bias)
        if state.ndim == 0 or state.shape[-1] != len(self.bias):
            condition = f"state must be [*b, {len(self.bias)}]"
            remedy = "Pass one number for each spin."
            raise InputValueError(f"Ising.{name}", "state", f"{condition}, got shape {shape_of(state)}", remedy)


def hebbian(patterns: Float[Tensor, "n d"], bias: Float[Tensor, " d"] | None = None) -> Ising:
    """Ising model that stores patterns by Hebb's rule: W = sum_n x_n x_n^T / d with zero diagonal.

    The energy n/2 - sum_n <x_n, x>² / 2d is quadratic in the overlaps, where `hopfield_energy` is exponential. The
    capacity is therefore about 0.14 d random patterns [amit85] instead of exponentially many.
    """
    _check_patterns("hebbian", patterns, bias)
    W = patterns.mT @ patterns / patterns.shape[-1]
    W = (W + W.mT) / 2  # symmetric up to rounding
    return Ising(W - torch.diag(W.diagonal()), patterns.new_zeros(patterns.shape[-1]) if bias is None else bias)


def gaussian_machine(
    patterns: Float[Tensor, "n d"], bias: Float[Tensor, " d"] | None = None, *, beta: float = 1.0
) -> Gibbs:
    """The network of `hebbian` as a pair of spins and hidden Gaussians, one for each pattern.

        exp(beta <x, X^T X x> / 2d) = ∫ exp(sqrt(beta / d) <X x, z>) dN(0, I)(z)        [Hubbard-Stratonovich] [barra12]

    Integrating the Gaussians out leaves exp(-beta E) exactly. The chain alternately draws all spins and all Gaussians;
    its x are the spins, its eta their fields.
    """
    _check_patterns("gaussian_machine", patterns, bias)
    n, d = patterns.shape
    hidden = Gaussian.diagonal(patterns.new_zeros(n), patterns.new_ones(n))
    field = patterns.new_zeros(d) if bias is None else beta * bias
    return Gibbs(Spins(field), pushforward(hidden, math.sqrt(beta / d) * patterns.mT))


def boltzmann_machine(
    weights: Float[Tensor, "d e"], visible_bias: Float[Tensor, " d"], hidden_bias: Float[Tensor, " e"]
) -> Gibbs:
    """Restricted Boltzmann machine of visible spins x and hidden spins y: p(x, y) ~ exp(<x, W y> + <a, x> + <c, y>).

    Given y, the visible spins are independent with means tanh(a + W y), and likewise y given x. In the chain, x are the
    visible spins and eta = W y their fields.

    >>> import torch
    >>> machine = boltzmann_machine(torch.randn(3, 2), torch.zeros(3), torch.zeros(2))
    >>> machine.chain(torch.zeros(100, 3), 10).x.abs().unique()
    tensor([1.])
    """
    check_floats("boltzmann_machine", weights=weights, visible_bias=visible_bias, hidden_bias=hidden_bias)
    if weights.ndim != 2 or weights.shape != visible_bias.shape + hidden_bias.shape:
        fact = f"shapes {shape_of(weights)}, {shape_of(visible_bias)} and {shape_of(hidden_bias)}"
        condition = "weights, visible_bias and hidden_bias must be [d, e], [d] and [e]"
        remedy = "Pass one row of weights for each visible spin and one column for each hidden spin."
        raise InputValueError("boltzmann_machine", "weights", f"{condition}, got {fact}", remedy)
    return Gibbs(Spins(visible_bias), pushforward(Spins(hidden_bias), weights))


def visible_distribution(machine: Gibbs) -> Empirical:
    """Exact distribution of the visible spins, hidden units summed out: weights exp<a, x> Z_g(x) on the 2^d states."""
    if not isinstance(machine.h, Spins) or machine.h.bias.ndim != 1:
        remedy = "Build it with boltzmann_machine or gaussian_machine."
        condition = "machine must have Spins with a single bias vector as its first measure"
        raise InputTypeError("visible_distribution", "machine", f"{condition}, got {type(machine.h).__name__}", remedy)
    points = spin_corners(machine.h.dim, like=machine.h.bias)
    return Empirical(points, points @ machine.h.bias + machine.g.log_normalizer(points))


def spin_corners(dim: int, *, like: Float[Tensor, "..."] | None = None) -> Float[Tensor, "n d"]:
    """All 2^d states of d spins, [2^d, d], in the dtype and on the device of `like`.

    >>> spin_corners(2).tolist()
    [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]
    """
    if not 1 <= dim <= MOST:
        remedy = "For more spins sample the chain of a machine, or use the mean field."
        raise InputValueError("spin_corners", "dim", f"dim must be from 1 to {MOST}, got {dim}", remedy)
    template = torch.zeros(()) if like is None else like
    index = torch.arange(2**dim, device=template.device).unsqueeze(-1)
    bits = (index >> torch.arange(dim - 1, -1, -1, device=template.device)) & 1
    return 2 * bits.to(template.dtype) - 1


def _along(field: Tensor, spins: Tensor) -> Tensor:
    return torch.where(field == 0, spins, field.sign())


def _check_patterns(call: str, patterns: Tensor, bias: Tensor | None) -> None:
    check_floats(call, patterns=patterns, **present(bias=bias))
    if patterns.ndim != 2 or patterns.numel() == 0 or (bias is not None and bias.shape != patterns.shape[1:]):
        fact = f"shape {shape_of(patterns)}" if bias is None else f"shapes {shape_of(patterns)} and {shape_of(bias)}"
        condition, remedy = "patterns must be [n, d] and bias [d]", "Pass one pattern in each row."
        raise InputValueError(call, "patterns", f"{condition}, got {fact}", remedy)
