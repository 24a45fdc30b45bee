"""In-context estimation of the parameters of exponential families, and heads that learn it, many runs at once.

    θ_1 ... θ_n    symbols of a prompt, drawn from a prior       η(θ_i) natural parameters
    x              drawn from p(x | θ_z), z uniform              log p(x | θ) = <x, η(θ)> - A(η(θ)) + a function of x
    target         θ_z                                           Bayes: sum_i softmax_i(log p(x | θ_i)) θ_i

    gaussian    x ~ N(θ, R)         η = R^-1 θ               A = <θ, R^-1 θ> / 2
    bernoulli   x ~ bits            η = log(θ / (1 - θ))     A = -sum log(1 - θ)
    poisson     x ~ counts          η = log θ                A = sum θ

A head has logits (W_q x)·(W_k θ_i) + b(θ_i) and values V θ_i + c. All tensors have a leading dimension r of runs: each
run has its own distribution and its own weights.

Read next: alignment.py (the statistics), experiment.py (the runs and the decisions).
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

Family = Literal["gaussian", "bernoulli", "poisson"]
HeadKind = Literal["dot product", "dot product, identity", "metric", "exact"]
FAMILIES, HEADS = get_args(Family), get_args(HeadKind)
INFORMATION = 8.0  # tr(S R^-1) of the Gaussian
SPREAD = {"bernoulli": 1.0, "poisson": 0.5}  # standard deviations of natural parameters


class Prompts(NamedTuple):
    """Symbols [r, b, n, d], queries [r, b, m, d] and targets [r, b, m, d]."""

    symbols: Tensor
    queries: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Distributions:
    """A distribution of prompts for each run.

    Attributes:
        noise: R [r, d, d], covariance of x given θ; at θ = m for bits and counts.
        centre: m [r, d], the symbol at the mean natural parameter.
        scale: standard deviations of symbols (Gaussian) or of natural parameters (others), [r, 1].
    """

    family: Family
    noise: Tensor
    centre: Tensor
    scale: Tensor

    @classmethod
    def drawn(cls, family: Family, runs: list[int], d: int) -> "Distributions":
        """Distributions by number: equal numbers are equal distributions."""
        rows = [_drawn(family, number, d) for number in runs]
        noise, centre, scale = (torch.stack(column) for column in zip(*rows, strict=True))
        return cls(family, noise, centre, scale)

    def prompts(self, seed: int, *, prompts: int, symbols: int, queries: int) -> Prompts:
        """Draw prompts for each run."""
        r, d = self.centre.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            standard = torch.randn(r, prompts, symbols, d)
            chosen = torch.randint(symbols, (r, prompts, queries, 1))
            scale, centre = self.scale[:, None, None], self.centre[:, None, None]
            if self.family == "gaussian":
                theta = centre + scale * standard
            elif self.family == "bernoulli":
                theta = torch.sigmoid(torch.logit(centre) + scale * standard)
            else:
                theta = torch.exp(torch.log(centre) + scale * standard)
            target = theta.gather(2, chosen.expand(-1, -1, -1, d))
            if self.family == "gaussian":
                root = torch.linalg.cholesky(self.noise).mT.unsqueeze(1)
                x = target + torch.randn_like(target) @ root
            else:
                x = torch.bernoulli(target) if self.family == "bernoulli" else torch.poisson(target)
        return Prompts(theta, x, target)

    def natural(self, theta: Tensor) -> Tensor:
        """Natural parameters η(θ), [r, ..., d]."""
        if self.family == "gaussian":
            return torch.einsum("rbnd,rde->rbne", theta, torch.linalg.inv(self.noise))
        return torch.logit(theta) if self.family == "bernoulli" else theta.log()

    def log_normalizer(self, theta: Tensor) -> Tensor:
        """A(η(θ)), [r, b, n]."""
        if self.family == "gaussian":
            return (theta * self.natural(theta)).sum(-1) / 2
        return -torch.log1p(-theta).sum(-1) if self.family == "bernoulli" else theta.sum(-1)

    def bayes(self, prompts: Prompts) -> Tensor:
        """Posterior means of the targets, [r, b, m, d]."""
        theta, x, _ = prompts
        logits = x @ self.natural(theta).mT - self.log_normalizer(theta).unsqueeze(-2)
        return logits.softmax(-1) @ theta


def _drawn(family: Family, number: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Noise covariance, centre and scale of a distribution."""
    generator = torch.Generator().manual_seed(1_000_003 * number + d)
    if family == "gaussian":
        Q, _ = torch.linalg.qr(torch.randn(d, d, generator=generator))
        eigenvalues = 4 ** (2 * torch.rand(d, generator=generator) - 1)
        scale = (INFORMATION / (1 / eigenvalues).sum()).sqrt()
        return (Q * eigenvalues) @ Q.mT, torch.zeros(d), scale.unsqueeze(0)
    uniform = torch.rand(d, generator=generator)
    m = 0.1 + 0.8 * uniform if family == "bernoulli" else 0.5 * 8**uniform
    return torch.diag(m * (1 - m) if family == "bernoulli" else m), m, torch.tensor([SPREAD[family]])


class Heads(nn.Module):
    """One head for each run; see plan.md for the kinds."""

    def __init__(self, kind: HeadKind, distributions: Distributions, seeds: list[int]) -> None:
        super().__init__()
        self.kind, self.distributions = kind, distributions
        d = distributions.centre.shape[-1]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]

        def drawn() -> nn.Parameter:
            return nn.Parameter(torch.stack([torch.randn(d, d, generator=g) / math.sqrt(d) for g in generators]))

        self.query, self.key = drawn(), drawn()
        if kind in ("dot product", "metric"):
            self.value = nn.Parameter(torch.eye(d).repeat(len(seeds), 1, 1) + drawn().detach() / 10)
            self.offset = nn.Parameter(torch.zeros(len(seeds), 1, 1, d))
        if kind == "metric":
            self.quadratic = nn.Parameter(torch.zeros(len(seeds), d, d))
            self.linear = nn.Parameter(torch.zeros(len(seeds), 1, 1, d))

    def forward(self, prompts: Prompts) -> Tensor:
        """Estimates of the targets, [r, b, m, d]."""
        output = self.weights(prompts) @ prompts.symbols
        if self.kind in ("dot product", "metric"):
            return output @ self.value.unsqueeze(1) + self.offset
        return output

    def weights(self, prompts: Prompts) -> Tensor:
        """Attention weights [r, b, m, n]."""
        theta, x, _ = prompts
        logits = (x @ self.query.unsqueeze(1)) @ (theta @ self.key.unsqueeze(1)).mT
        if self.kind == "metric":
            quadratic = ((theta @ self.quadratic.unsqueeze(1)) * theta).sum(-1) / 2
            logits = logits + ((self.linear * theta).sum(-1) - quadratic).unsqueeze(-2)
        elif self.kind == "exact":
            logits = logits - self.distributions.log_normalizer(theta).unsqueeze(-2)
        return logits.softmax(-1)

    def qk_matrices(self) -> Tensor:
        """B = W_q W_k^T, [r, d, d]."""
        return (self.query @ self.key.mT).detach().double()

    def fisher_information(self, prompts: Prompts) -> Tensor:
        """Mean covariance of the symbols under the weights, [r, d, d]: ∇² log Z with respect to B^T x."""
        with torch.no_grad():
            theta, p = prompts.symbols.double(), self.weights(prompts).double()
            received, mean = p.sum(2).unsqueeze(-1), p @ theta
            second = torch.einsum("rbnd,rbne->rde", received * theta, theta)
            return (second - torch.einsum("rbmd,rbme->rde", mean, mean)) / (p.shape[1] * p.shape[2])


def risk(estimates: Tensor, prompts: Prompts) -> Tensor:
    """Mean squared error of each run, [r]."""
    return (estimates - prompts.targets).square().sum(-1).mean((1, 2))
