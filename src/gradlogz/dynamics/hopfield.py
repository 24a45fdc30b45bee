"""Modern Hopfield networks: retrieval of stored patterns by attention.

    E(x)  = |x|²/2 - log sum_n exp(beta <x_n, x>) / beta + log N / beta + M²/2            M = max |x_n|   [ramsauer20]
    x'    = (1 - s) x + s att(x)                                            lowers E by at least s (1 - s/2) |x - att|²
    exp(-beta E) is a mixture of Gaussians with means x_n and covariance I / beta                         [theory 5.6]
    |att(x_i) - x_i| <= 2 M (N - 1) exp(-beta Delta_i),  Delta_i = min_j <x_i, x_i - x_j>                 [theory 5.7]

A residual attention step followed by division by 1 + tau is the update with s = tau / (1 + tau): use evolve(...,
contraction="shrinkage") with fixed keys.

Read next: evolution.py (patterns that move).
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from .._errors import InputRuntimeError, InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.attention.operator import attention
from ..kernels.attention.scoring import Scoring, Sight


class Retrieval(NamedTuple):
    """Final states, with the convergence flag and the number of updates of each."""

    state: Float[Tensor, "*b m d"]
    converged: Bool[Tensor, "*b m"]
    steps: Int[Tensor, "*b m"]


def hopfield_energy(
    state: Float[Tensor, "*b m d"], patterns: Float[Tensor, "*b n d"], *, beta: float = 1.0
) -> Float[Tensor, "*b m"]:
    """Energy of every state, at least 0: |x|²/2 - log sum_n exp(beta <x_n, x>) / beta + log N / beta + M²/2."""
    _check("hopfield_energy", state, patterns, beta)
    _, G = _attended(state, patterns, beta)
    most = patterns.square().sum(-1).amax(-1, keepdim=True)
    return (state.square().sum(-1) + most) / 2 + (math.log(patterns.shape[-2]) - G) / beta


def retrieve(
    state: Float[Tensor, "*b m d"],
    patterns: Float[Tensor, "*b n d"],
    *,
    beta: float = 1.0,
    damping: float = 1.0,
    max_iterations: int = 100,
    tolerance: float | None = None,
    throw: bool = True,
) -> Retrieval:
    """Repeat the update x <- (1 - s) x + s att(x) until every state converges, with damping s in (0, 2).

    States are updated independently, and each stops when it has converged. Gradients pass through the updates.

    Args:
        beta: inverse temperature.
        damping: step size s; 1 is the undamped update.
        max_iterations: largest number of updates.
        tolerance: length of an update, relative to the longest pattern, at which a state has converged; default:
            sqrt(eps) of the dtype.
        throw: raise an error if a state does not converge; otherwise see `converged`.

    Law: tests/laws/test_hopfield_networks_retrieve.py.

    >>> import torch
    >>> patterns = torch.nn.functional.normalize(torch.randn(20, 64, dtype=torch.float64), dim=-1)
    >>> result = retrieve(patterns + 0.02 * torch.randn_like(patterns), patterns, beta=50.0)
    >>> bool((result.state - patterns).norm(dim=-1).max() < 1e-6), int(result.steps.max()) <= 3
    (True, True)
    """
    _check("retrieve", state, patterns, beta)
    if not 0 < damping < 2:
        remedy = "Use 1, the undamped update, or less for smaller steps."
        raise InputValueError("retrieve", "damping", f"damping must be in (0, 2), got {damping}", remedy)
    size = patterns.detach().square().sum(-1).amax(-1, keepdim=True).sqrt()
    threshold = (torch.finfo(state.dtype).eps ** 0.5 if tolerance is None else tolerance) * size
    x = state
    converged = torch.zeros(state.shape[:-1], dtype=torch.bool, device=state.device)
    counts = torch.zeros(state.shape[:-1], dtype=torch.long, device=state.device)
    for _ in range(max_iterations):
        out, _ = _attended(x, patterns, beta)
        moved = damping * (out - x)
        x = torch.where(converged.unsqueeze(-1), x, x + moved)
        counts = counts + (~converged).long()
        converged = converged | (moved.detach().norm(dim=-1) <= threshold)
        if bool(converged.all()):
            break
    if throw and not bool(converged.all()):
        failed = f"{int((~converged).sum())} of {converged.numel()} states"
        problem = f"{failed} did not converge within max_iterations={max_iterations}"
        remedy = "Raise max_iterations, or pass throw=False and check converged."
        raise InputRuntimeError("retrieve", "max_iterations", problem, remedy)
    return Retrieval(x, converged, counts)


def pattern_separation(patterns: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
    """Separation of each pattern from the others, Delta_i = min over j of <x_i, x_i - x_j>, [*b, n]."""
    _check("pattern_separation", patterns, patterns, 1.0)
    products = patterns @ patterns.mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    others = products.masked_fill(torch.eye(patterns.shape[-2], dtype=torch.bool, device=patterns.device), -torch.inf)
    return squares - others.amax(-1)


def retrieval_bound(patterns: Float[Tensor, "*b n d"], *, beta: float = 1.0) -> Float[Tensor, "*b n"]:
    """Upper bound on the distance of att(x_i) from the pattern x_i: 2 M (N - 1) exp(-beta Delta_i), [*b, n].

    Law: tests/laws/test_hopfield_networks_retrieve.py.
    """
    M = patterns.square().sum(-1).amax(-1, keepdim=True).sqrt()
    return 2 * M * (patterns.shape[-2] - 1) * torch.exp(-beta * pattern_separation(patterns))


def capacity_constant(*, beta: float, K: float, d: int, p: float) -> float:
    """Constant c of the capacity N >= sqrt(p) c^((d-1)/4) for random patterns of length K sqrt(d - 1).

        c = b / W(exp(a + log b)),  a = 2 (1 + log(2 beta K² p (d - 1))) / (d - 1),  b = 2 K² beta / 5

    W is Lambert's function, p the probability that retrieval fails.   [ramsauer20, Thm. 3]
    """
    if not (beta > 0 and K > 0 and d > 1 and 0 < p <= 1):
        condition, fact = "beta and K must be positive, d > 1 and 0 < p <= 1", f"beta={beta}, K={K}, d={d} and p={p}"
        remedy = "Pass the probability of failure as p."
        raise InputValueError("capacity_constant", "beta", f"{condition}, got {fact}", remedy)
    a = 2 * (1 + math.log(2 * beta * K**2 * p * (d - 1))) / (d - 1)
    b = 2 * K**2 * beta / 5
    # W e^W = z by Newton's method in log W: log W + W = log z is concave and increasing.
    z, w = a + math.log(b), 1.0
    for _ in range(100):
        step = (math.log(w) + w - z) / (1 / w + 1)
        w = w - step if step < w else w / 2
    return b / w


class HopfieldRetrieval(nn.Module):
    """Layer that retrieves learned patterns.

    Args:
        patterns: initial patterns [n, d], or their shape (n, d) to draw them at random.
        beta: inverse temperature.
        steps: number of updates; one is attention.
        damping: step size of an update.
    """

    def __init__(
        self,
        patterns: Float[Tensor, "n d"] | tuple[int, int],
        *,
        beta: float = 1.0,
        steps: int = 1,
        damping: float = 1.0,
    ) -> None:
        super().__init__()
        drawn = torch.randn(*patterns) * patterns[1] ** -0.5 if isinstance(patterns, tuple) else patterns.clone()
        self.patterns = nn.Parameter(drawn)
        self.beta, self.steps, self.damping = beta, steps, damping

    def forward(self, state: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        """The states after `steps` updates, [*b, m, d]."""
        x = state
        for _ in range(self.steps):
            out, _ = _attended(x, self.patterns.expand(*x.shape[:-2], *self.patterns.shape), self.beta)
            x = (1 - self.damping) * x + self.damping * out
        return x

    def extra_repr(self) -> str:
        n, d = self.patterns.shape
        return f"{n} patterns of size {d}, beta={self.beta}, steps={self.steps}, damping={self.damping}"


def _attended(state: Tensor, patterns: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Attention output and log normaliser of every state."""
    lead, (m, d) = state.shape[:-2], state.shape[-2:]
    b = math.prod(lead)
    k = patterns.expand(*lead, *patterns.shape[-2:]).reshape(b, 1, patterns.shape[-2], d)
    result = attention(state.reshape(b, 1, m, d), k, k, Sight(), Scoring(float(beta)), statistics=False)
    return result.output.reshape(state.shape), result.log_normalizer.reshape(*lead, m)


def _check(call: str, state: Tensor, patterns: Tensor, beta: float) -> None:
    check_floats(call, state=state, patterns=patterns)
    if state.ndim < 2 or patterns.ndim < 2 or state.shape[-1] != patterns.shape[-1] or patterns.shape[-2] == 0:
        fact = f"shapes {shape_of(state)} and {shape_of(patterns)}"
        remedy = "Add the missing dimension with unsqueeze."
        raise InputValueError(call, "state", f"state must be [*b, m, d] and patterns [*b, n, d], got {fact}", remedy)
    if not beta > 0:
        raise InputValueError(
            call, "beta", f"beta must be positive, got {beta}", "Pass a positive inverse temperature."
        )
