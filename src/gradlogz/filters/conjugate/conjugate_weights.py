"""Attention to natural parameters with conjugate-prior weights: the posterior of eta given a mean.

    family     p(u | eta)          = exp(<u, eta> - G(eta)) h(du)
    weights    P(eta_i | xi, nu)   ∝ pi_i exp(<xi, eta_i> - nu G(eta_i))                               [theory E51, E58]
    a mean mu of nu observations has xi = nu mu:
               P(eta_i | mu)       ∝ pi_i exp(nu (<mu, eta_i> - G(eta_i)))  ∝  pi_i exp(-nu KL(mu‖eta_i))
    the same   softmax attention with the keys (eta_i, -G(eta_i)), the query (xi, nu) and the key bias log pi_i

The statistics of a conjugate prior are eta and -G(eta), so its log normaliser and its mean are those of an empirical
measure on these keys. Softmax attention over keys mu_i is the likelihood p(mu_i | eta_j); attention over natural
parameters without the bias -nu G(eta_i) is the posterior only if all G(eta_i) are equal, as for eta_i of one length on
a sphere.

Read next: conjugate_filter.py (posteriors in closed form), attention_filter.py, ../../measures/prior.py (the conjugate
prior as a measure).
"""

from typing import NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_floats, present, shape_of
from ..._typing import Float, Tensor
from ...measures import Empirical
from ...measures.measure import Measure


class EtaPosterior(NamedTuple):
    """Posterior of the natural parameter, one for each pair (xi, nu).

    Attributes:
        eta: posterior mean of the natural parameter.
        mean: posterior mean of ∇G(eta), the predicted mean of the next observation.
        log_normalizer: log sum_i pi_i exp(<xi, eta_i> - nu G(eta_i)), with pi normalised. In `filter` it is the log
            density of the observations so far relative to h.
        log_probability: log posterior probability of each eta_i.
    """

    eta: Float[Tensor, "*b d"]
    mean: Float[Tensor, "*b d"]
    log_normalizer: Float[Tensor, "*b"]
    log_probability: Float[Tensor, "*b n"]


class ConjugateWeights:
    """Finitely many natural parameters of a family, weighted by their conjugate posterior.

    Args:
        h: measure of the family, without batch dimensions; its log normaliser is G.
        eta: natural parameters, the keys.
        log_prior: log prior probability of each, up to a constant; None is uniform.

    Cost: that of attention with n keys of d + 1 components; `EtaPosterior` also has n probabilities for each query.
    Law: tests/laws/test_conjugate_weights_are_posteriors.py.

    >>> import torch
    >>> from gradlogz import Poisson
    >>> rates = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    >>> weights = ConjugateWeights(Poisson(torch.ones(1, dtype=torch.float64)), rates.log().unsqueeze(-1))
    >>> counts = torch.tensor([[5.0], [3.0], [4.0]], dtype=torch.float64)
    >>> weights.filter(counts).log_probability.argmax(-1)
    tensor([1, 1, 1])
    >>> likelihoods = torch.distributions.Poisson(rates).log_prob(counts).sum(0)
    >>> torch.allclose(weights.filter(counts).log_probability[-1], likelihoods.log_softmax(-1))
    True
    """

    def __init__(self, h: Measure, eta: Float[Tensor, "n d"], *, log_prior: Float[Tensor, "n"] | None = None) -> None:
        call = "ConjugateWeights"
        check_floats(call, eta=eta, **present(log_prior=log_prior))
        if eta.ndim != 2 or eta.shape[-1] != h.dim or len(eta) == 0 or h.batch_shape:
            condition = f"eta must be [n, d={h.dim}] and h must have no batch dimensions"
            fact = f"shape {shape_of(eta)} and batch {tuple(h.batch_shape)}"
            raise InputValueError(call, "eta", f"{condition}, got {fact}", "Pass one natural parameter in each row.")
        if log_prior is not None and log_prior.shape != eta.shape[:1]:
            condition, fact = f"log_prior must be [{len(eta)}]", f"shape {shape_of(log_prior)}"
            raise InputValueError(call, "log_prior", f"{condition}, got {fact}", "Pass one for each eta, or None.")
        self.h, self.eta = h, eta
        prior = eta.new_zeros(len(eta)) if log_prior is None else log_prior
        keys = torch.cat((eta, -h.log_normalizer(eta).unsqueeze(-1)), -1)
        self.measure = Empirical(keys, prior.log_softmax(-1))

    @without_autocast
    def update(self, xi: Float[Tensor, "*b d"], nu: float | Float[Tensor, "*b"]) -> EtaPosterior:
        """Posterior given the sum xi of observed statistics and their number nu."""
        query = self._query("ConjugateWeights.update", xi, nu)
        G = self.measure.log_normalizer(query)
        keys, log_pi = self.measure.points, self.measure.log_weights
        assert log_pi is not None  # set by __init__
        log_p = query @ keys.mT + log_pi - G.unsqueeze(-1)
        mean = self.measure.expect(self.h.mean(self.eta), query)
        return EtaPosterior(self.measure.mean(query)[..., :-1], mean, G, log_p)

    @without_autocast
    def attend(
        self, mean: Float[Tensor, "*b d"], *, strength: float | Float[Tensor, "*b"] = 1.0, value: Float[Tensor, "n v"]
    ) -> Float[Tensor, "*b v"]:
        """Average of values with the weights exp(-nu KL(mu‖eta_i)), in linear memory.

        Args:
            mean: means mu, the queries.
            strength: nu, the number of observations that a mean counts for; large values select the nearest eta.
            value: a value for each natural parameter.
        """
        call = "ConjugateWeights.attend"
        check_floats(call, mean=mean, value=value)
        if value.ndim != 2 or len(value) != len(self.eta):
            condition, fact = f"value must be [n={len(self.eta)}, v]", f"shape {shape_of(value)}"
            raise InputValueError(call, "value", f"{condition}, got {fact}", "Pass one value for each eta.")
        nu = torch.as_tensor(strength, dtype=mean.dtype, device=mean.device)
        return self.measure.expect(value, self._query(call, nu.unsqueeze(-1) * mean, nu))

    @without_autocast
    def filter(self, statistics: Float[Tensor, "*b t d"]) -> EtaPosterior:
        """Posterior after each of the observed statistics u_1 ... u_t; rows with NaN are missing.

        All times are computed at once: xi_t = u_1 + ... + u_t, nu_t = t.
        """
        observed = ~statistics.isnan().any(-1)
        xi = torch.where(observed.unsqueeze(-1), statistics, 0.0).cumsum(-2)
        return self.update(xi, observed.to(statistics.dtype).cumsum(-1))

    def _query(self, call: str, xi: Tensor, nu: float | Tensor) -> Tensor:
        """Natural parameters (xi, nu) of the conjugate prior."""
        check_floats(call, xi=xi, eta=self.eta)
        count = torch.as_tensor(nu, dtype=xi.dtype, device=xi.device)
        if xi.ndim == 0 or xi.shape[-1] != self.eta.shape[-1] or count.ndim > xi.ndim - 1:
            condition = f"xi must be [*b, d={self.eta.shape[-1]}] and nu a number or [*b]"
            fact = f"shapes {shape_of(xi)} and {shape_of(count)}"
            raise InputValueError(call, "xi", f"{condition}, got {fact}", "Pass sufficient statistics of the family.")
        return torch.cat((xi, count.expand(xi.shape[:-1]).unsqueeze(-1)), -1)
