"""Gibbs sampling between two measures: the Markov chain behind alternating attention.

    p(x, eta) ~ h(dx) g(deta) exp<x, eta>                                            the joint distribution [theory 8.5]
    x ~ P_h(. | eta)          one key, drawn with the attention weights of the query
    eta ~ P_g(. | x)          one query, drawn with the softmax over queries
    stationary:  eta ~ g(deta) Z_h(eta),    x ~ h(dx) Z_g(x)

The joint distribution exists if its mass is finite: always for finite sets, for Gaussians N(mu, Sigma) and N(a, B) if
and only if rho(B Sigma) < 1. The covariance B = Sigma^-1 of Theorem 1 is the boundary case. Means instead of draws give
alternating cross-attention: coordinate ascent on a lower bound of the log mass.

Read next: empirical.py, gaussian.py.
"""

from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError
from .._typing import Float, Tensor
from .empirical import Empirical
from .gaussian import Gaussian
from .measure import Measure, check_measures


class GibbsChain(NamedTuple):
    """Draws of a chain: one query and one key per step."""

    x: Float[Tensor, "t ..."]
    eta: Float[Tensor, "t ..."]


class GibbsMeanField(NamedTuple):
    """Last means, and the lower bound of the log mass after each round."""

    x: Float[Tensor, "..."]
    eta: Float[Tensor, "..."]
    bound: Float[Tensor, "t ..."]


class Gibbs:
    """Joint distribution h(dx) g(deta) exp<x, eta> of two measures on the same space, and its sampler.

    Law: tests/laws/test_two_measures_sample_each_other.py.
    """

    def __init__(self, h: Measure, g: Measure) -> None:
        check_measures("Gibbs", h=h, g=g)
        if h.dim != g.dim:
            remedy = "Map one of them with pushforward first."
            raise InputValueError("Gibbs", "h", f"h and g must have equal dimensions, got {h.dim} and {g.dim}", remedy)
        self.h, self.g = h, g
        if isinstance(h, Gaussian) and isinstance(g, Gaussian):
            radius = float(torch.linalg.eigvals(g.covariance(g.loc) @ h.covariance(h.loc)).abs().max())
            if radius >= 1 - 1e-12:
                condition = "h and g must be Gaussians with rho(B Sigma) < 1"
                remedy = "Shrink one of the covariances: at 1 the chain has no stationary distribution."
                raise InputValueError("Gibbs", "h", f"{condition}, got {radius:.6g}", remedy)

    def chain(self, eta: Float[Tensor, "*m d"], steps: int, *, generator: torch.Generator | None = None) -> GibbsChain:
        """Draws of `steps` rounds of the reversible chain, starting from these queries."""
        _check_steps("Gibbs.chain", steps)
        xs, etas = [], []
        for _ in range(steps):
            x = self.h.sample(eta, generator=generator)
            eta = self.g.sample(x, generator=generator)
            xs.append(x)
            etas.append(eta)
        return GibbsChain(torch.stack(xs), torch.stack(etas))

    def transition(self) -> Float[Tensor, "k k"]:
        """Transition matrix between queries, for finite sets: row softmax times column softmax of the logits."""
        s, to_keys, to_queries = self._logits()
        return (s + to_keys).softmax(-1) @ (s.mT + to_queries).softmax(-1)

    def stationary(self) -> Float[Tensor, " k"]:
        """Stationary distribution of the queries, for finite sets: g_i Z_i, normalised."""
        s, to_keys, to_queries = self._logits()
        return ((s + to_keys).logsumexp(-1) + to_queries).softmax(-1)

    def log_mass(self) -> Float[Tensor, ""]:
        """Log mass of the joint distribution, for finite sets or Gaussians."""
        if isinstance(self.h, Gaussian) and isinstance(self.g, Gaussian):
            mu, a = self.h.loc, self.g.loc
            Sigma, B = self.h.covariance(mu), self.g.covariance(a)
            eye = torch.eye(self.h.dim, dtype=mu.dtype, device=mu.device)
            # ∫ exp(<mu, eta> + <eta, Sigma eta>/2) dN(a, B): a Gaussian integral of precision B^-1 - Sigma.
            inner = torch.linalg.solve(eye - B @ Sigma, a + B @ mu)
            quadratic = (mu * (inner + a)).sum(-1) / 2 + (a * (Sigma @ inner.unsqueeze(-1)).squeeze(-1)).sum(-1) / 2
            return quadratic - torch.linalg.slogdet(eye - B @ Sigma).logabsdet / 2
        s, to_keys, to_queries = self._logits()
        return (s + to_keys + to_queries.unsqueeze(-1)).flatten().logsumexp(0)

    def mean_field(self, eta: Float[Tensor, "*m d"], *, steps: int) -> GibbsMeanField:
        """Mean-field iteration x = ∇G_h(eta), eta = ∇G_g(x), which never decreases <x, eta> - G_h*(x) - G_g*(eta)."""
        _check_steps("Gibbs.mean_field", steps)
        bounds = []
        x = self.h.mean(eta)
        for _ in range(steps):
            eta = self.g.mean(x)
            # G_g*(eta) = <x, eta> - G_g(x) at the x whose mean is eta, and the maximum over x for this eta is G_h(eta).
            bounds.append(self.h.log_normalizer(eta) + self.g.log_normalizer(x) - (x * eta).sum(-1))
            x = self.h.mean(eta)
        return GibbsMeanField(x, eta, torch.stack(bounds))

    def _logits(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits <eta_i, x_j>, and log weights of keys and queries."""
        if not (isinstance(self.h, Empirical) and isinstance(self.g, Empirical)):
            fact = f"{type(self.h).__name__} and {type(self.g).__name__}"
            remedy = "Draw with chain instead."
            raise InputTypeError(
                "Gibbs", "h", f"h and g must be Empirical measures for this method, got {fact}", remedy
            )
        keys, queries = self.h.points, self.g.points
        per_query = any(h.log_weights is not None and h.log_weights.ndim != 1 for h in (self.h, self.g))
        if keys.ndim != 2 or queries.ndim != 2 or per_query:
            remedy = "Pass one pair of measures at a time, with one log weight for each point."
            problem = "h and g must have neither batch dimensions nor weights per query for this method"
            raise InputValueError("Gibbs", "h", problem, remedy)
        to_keys = keys.new_zeros(len(keys)) if self.h.log_weights is None else self.h.log_weights
        to_queries = queries.new_zeros(len(queries)) if self.g.log_weights is None else self.g.log_weights
        return queries @ keys.mT, to_keys, to_queries


def _check_steps(call: str, steps: int) -> None:
    if steps < 1:
        raise InputValueError(call, "steps", f"steps must be at least 1, got {steps}", "Pass the number of rounds.")
