"""Softmax attention as a switching filter without observations, and the covariance that it drops.

    P(A_t = i, A_{t+1} = j) ∝ pi_i psi_j exp(beta <mu_i, eta_j>)               slots i before and j after [theory 8.1]
    P(A_t = i | A_{t+1} = j) = softmax_i(log pi_i + beta <mu_i, eta_j>)        attention weights, for any psi
    x_{t+1} = x_t W_v + N(0, Q)                                                one map for all slots, or W_j for each
    mean   E[x_{t+1} | j]   = sum_i A_ij mu_i W_v                              softmax attention, exactly
    spread Cov[x_{t+1} | j] = W_v^T (sum_i A_ij Sigma_i + Cov_A(mu)) W_v + Q   dropped by a transformer            [8.3]

This is the interacting multiple model filter (../gaussian/switching.py) with transition probabilities that depend on
the means: mix, move, no update. If values are keys, Cov_A(mu) is the Fisher information ∇² log Z(eta_j). `weights`
selects psi, and so the probabilities of the next slots, pi'_j ∝ psi_j Z_j, which attention itself does not propagate.

Read next: ../gaussian/attentive_switching.py (such transitions with observations), conjugate_weights.py (attention to
natural parameters), ../../measures/gibbs.py (samples in place of means).
"""

import math
from typing import Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_floats, has_values, present, shape_of
from ..._typing import Float, Tensor
from ...measures import Empirical, Gaussian, Mixture
from ...measures.measure import Measure
from ...special.log_domain import log_sum_exp
from ..moment_matching import symmetric

UNREAD = 200  # Sinkhorn iterations if convergence cannot be checked, under torch.func and torch.compile


class Slots(NamedTuple):
    """Mean, covariance and probability of the state in each slot n.

    Attributes:
        mean: the hidden state of a transformer.
        covariance: covariance of the state in each slot; None if it is not propagated.
        log_probability: log probability of each slot, added to the logits as a key bias; None is uniform.
    """

    mean: Float[Tensor, "*b n d"]
    covariance: Float[Tensor, "*b n d d"] | None = None
    log_probability: Float[Tensor, "*b n"] | None = None


class Collapsed(NamedTuple):
    """Result of one step of an attention filter.

    Attributes:
        slots: the next slots.
        log_normalizer: log Z_j, the log evidence of each slot; the log-sum-exp of attention.
        log_received: log P(A_t = i), the share of the total attention that slot i receives.
    """

    slots: Slots
    log_normalizer: Float[Tensor, "*b m"]
    log_received: Float[Tensor, "*b n"]


class Coupling(NamedTuple):
    """Probability of the previous slot and transition to the next slot, as arguments of `imm`."""

    log_probability: Float[Tensor, "*b n"]
    transition: Float[Tensor, "*b n m"]


class AttentionFilter:
    """A filter whose slots attend to each other.

    Args:
        value: W_v [d, e], the same for all slots, or [m, d, e], one map W_j for each next slot j, as the modes of a
            switching system have: the mean of slot j is (sum_i A_ij mu_i) W_j.   [theory E55]  None is the identity.
        noise: Q [e, e], added to covariances, or [m, e, e], one for each next slot.
        scale: inverse temperature beta.
        message: "mean" is softmax attention; "covariance" also propagates the covariance.
        coupling: "mean", exp(beta <mu_i, eta_j>), or "state", exp(beta <x, eta_j>). With "state" a slot with a
            covariance has the logit beta <mu_i, eta_j> + beta² eta_j^T Sigma_i eta_j / 2 and its mean shifts by
            beta Sigma_i eta_j.  [8.4]
        weights: choice of psi. "one": pi'_j ∝ Z_j. "normalizer": psi_j = 1/Z_j, pi' uniform. "sinkhorn": P(A_t) = pi
            and pi' uniform, which changes the attention weights; they are doubly stochastic if pi is uniform.
        tolerance: relative tolerance of the marginals in the Sinkhorn iteration.
        max_iterations: maximum number of Sinkhorn iterations.

    Cost: that of attention; with covariances m n d² operations and m x n weights.
    Law: tests/laws/test_attention_is_a_filter.py.

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> x, W_q, W_v = torch.randn(5, 8, dtype=torch.float64), *torch.randn(2, 8, 8, dtype=torch.float64)
    >>> attention = AttentionFilter(value=W_v, scale=8**-0.5)
    >>> result = attention.step(Slots(x), eta=x @ W_q)
    >>> torch.allclose(result.slots.mean, scaled_dot_product_attention(x @ W_q, x, x @ W_v))
    True
    """

    def __init__(
        self,
        *,
        value: Float[Tensor, "d e"] | Float[Tensor, "m d e"] | None = None,
        noise: Float[Tensor, "e e"] | Float[Tensor, "m e e"] | None = None,
        scale: float = 1.0,
        message: Literal["mean", "covariance"] = "mean",
        coupling: Literal["mean", "state"] = "mean",
        weights: Literal["one", "normalizer", "sinkhorn"] = "one",
        tolerance: float = 1e-12,
        max_iterations: int = 10_000,
    ) -> None:
        call = "AttentionFilter"
        check_floats(call, **present(value=value, noise=noise))
        choices = {
            "message": (message, ("mean", "covariance")),
            "coupling": (coupling, ("mean", "state")),
            "weights": (weights, ("one", "normalizer", "sinkhorn")),
        }
        for name, (chosen, known) in choices.items():
            if chosen not in known:
                condition = f"{name} must be one of {', '.join(known)}"
                raise InputValueError(call, name, f"{condition}, got {chosen!r}", f"See {call} for their meaning.")
        if noise is not None and message == "mean":
            remedy = 'Pass message="covariance", or drop noise.'
            raise InputValueError(call, "noise", 'noise needs propagated covariances, got message="mean"', remedy)
        if weights == "sinkhorn" and coupling == "state":
            remedy = 'Use coupling="mean".'
            raise InputValueError(call, "sinkhorn", 'sinkhorn needs coupling="mean", got coupling="state"', remedy)
        self.value, self.noise, self.scale = value, noise, scale
        self.message, self.coupling, self.weights = message, coupling, weights
        self.tolerance, self.max_iterations = tolerance, max_iterations

    @without_autocast
    def step(self, slots: Slots, eta: Float[Tensor, "*b m d"]) -> Collapsed:
        """Advance the slots by one step, given the natural parameters (queries) eta of the next slots."""
        self._check("AttentionFilter.step", slots, eta)
        h, natural = self._measure(slots, eta), self.scale * eta
        G = h.log_normalizer(natural)
        mean = h.mean(natural)
        covariance = None
        if self.message == "covariance":
            covariance = self._sent(self._spread(h, slots, natural))
        log_after = self._log_after(G)
        if self.value is not None:
            mean = (mean.unsqueeze(-2) @ self.value).squeeze(-2)
        slots_after = Slots(mean, covariance, log_after)
        return Collapsed(slots_after, G, self._log_received(slots, natural, h, log_after - G))

    @without_autocast
    def dropped(self, slots: Slots, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m e e"]:
        """Covariance of the next state given its slot, which softmax attention drops.   [theory 8.3]"""
        self._check("AttentionFilter.dropped", slots, eta)
        h, natural = self._measure(slots, eta), self.scale * eta
        return self._sent(self._spread(h, slots, natural))

    @without_autocast
    def chain(self, slots: Slots, eta: Float[Tensor, "*b m d"]) -> Coupling:
        """Return P(A_t) and P(A_{t+1} | A_t), with which `imm` without observations equals this filter.

        The transition matrix has n x m entries. Slots of probability 0 have uniform rows.
        """
        self._check("AttentionFilter.chain", slots, eta)
        h, natural = self._measure(slots, eta), self.scale * eta
        p = h.responsibilities(natural) if isinstance(h, Mixture) else h.probabilities(natural)  # type: ignore[attr-defined]
        joint = (p * self._log_after(h.log_normalizer(natural)).exp().unsqueeze(-1)).mT
        before = joint.sum(-1)
        alive = (before > 0).unsqueeze(-1)
        transition = torch.where(alive, joint / torch.where(alive, before.unsqueeze(-1), 1.0), 1 / eta.shape[-2])
        return Coupling(before.log(), transition)

    # Parts of a step --------------------------------------------------------------------------------------------------

    def _measure(self, slots: Slots, eta: Tensor) -> Measure:
        """Base measure of the family whose natural parameters are the queries: weighted points or Gaussians."""
        log_pi = slots.log_probability
        if self.weights == "sinkhorn":
            log_pi = self._sinkhorn(slots, self.scale * eta)
        if self.coupling == "mean" or slots.covariance is None:
            return Empirical(slots.mean, log_pi)
        log_pi = slots.mean.new_zeros(slots.mean.shape[:-1]) if log_pi is None else log_pi
        return Mixture(log_pi.log_softmax(-1), Gaussian(slots.mean, slots.covariance))

    def _spread(self, h: Measure, slots: Slots, natural: Tensor) -> Tensor:
        """Covariance Cov[x | j] before the value map."""
        between = h.covariance(natural)
        if isinstance(h, Mixture) or slots.covariance is None:
            return between
        within = h.expect(slots.covariance.flatten(-2), natural).unflatten(-1, slots.covariance.shape[-2:])
        return between + within

    def _sent(self, covariance: Tensor) -> Tensor:
        W = self.value
        moved = covariance if W is None else W.mT @ covariance @ W
        return symmetric(moved if self.noise is None else moved + self.noise)

    def _log_after(self, G: Tensor) -> Tensor:
        """Log probabilities of the next slots, log pi'_j = log psi_j + log Z_j up to a constant."""
        return (G if self.weights == "one" else torch.zeros_like(G)).log_softmax(-1)

    def _log_received(self, slots: Slots, natural: Tensor, h: Measure, log_psi: Tensor) -> Tensor:
        """log P(A_t = i) = log pi_i + log sum_j psi_j exp(logit_ij): attention with queries and keys exchanged."""
        if isinstance(h, Mixture):
            shares = h.responsibilities(natural)
            log_shares = torch.where(shares > 0, shares, 1.0).log().masked_fill(shares <= 0, -torch.inf)
            joint = (log_shares + (log_psi + h.log_normalizer(natural)).unsqueeze(-1)).mT
            return log_sum_exp(joint)
        back = Empirical(natural, log_psi).log_normalizer(slots.mean)
        log_pi = h.log_weights  # type: ignore[attr-defined]
        return back if log_pi is None else back + log_pi

    def _sinkhorn(self, slots: Slots, natural: Tensor) -> Tensor:
        """Key biases for which the previous slots have probability pi and the next are uniform; linear memory."""
        n, m = slots.mean.shape[-2], natural.shape[-2]
        uniform = slots.mean.new_full(slots.mean.shape[:-1], -math.log(n))
        log_pi = uniform if slots.log_probability is None else slots.log_probability.log_softmax(-1)
        f, readable = log_pi, has_values(slots.mean, natural)
        for _ in range(self.max_iterations if readable else min(self.max_iterations, UNREAD)):
            g = -math.log(m) - Empirical(slots.mean, f).log_normalizer(natural)
            received = f + Empirical(natural, g).log_normalizer(slots.mean)
            off = torch.where(log_pi == -torch.inf, 0.0, log_pi - received)
            if readable and bool((off.detach().abs() <= self.tolerance).all()):
                return f
            f = torch.where(log_pi == -torch.inf, log_pi, f + off)
        if readable:
            condition = f"the Sinkhorn iteration did not converge within {self.max_iterations} iterations"
            fact = f"the marginals have an error of {float(off.detach().abs().max()):.3g}"
            raise InputValueError(
                "AttentionFilter",
                "max_iterations",
                f"{condition}; {fact}",
                "Raise max_iterations, or lower the scale.",
            )
        return f

    def _check(self, call: str, slots: Slots, eta: Tensor) -> None:
        mean, covariance, log_pi = slots
        optional = present(covariance=covariance, log_probability=log_pi, value=self.value, noise=self.noise)
        check_floats(call, mean=mean, eta=eta, **optional)
        fits = mean.ndim > 1 and eta.ndim == mean.ndim and eta.shape[-1] == mean.shape[-1]
        if not fits or 0 in (mean.shape[-2], eta.shape[-2]):
            condition = "slots.mean must be [*b, n, d] and eta [*b, m, d], with at least one slot"
            fact = f"shapes {shape_of(mean)} and {shape_of(eta)}"
            raise InputValueError(
                call, "slots.mean", f"{condition}, got {fact}", "Project queries into the space of the keys first."
            )
        m, d = eta.shape[-2], mean.shape[-1]
        if self.value is not None and self.value.shape[:-1] not in ((d,), (m, d)):
            condition, fact = f"value must be [d={d}, e] or [m={m}, d={d}, e]", f"shape {shape_of(self.value)}"
            remedy = "Pass W_v for tokens as rows, x' = x W_v, or one such map for each next slot."
            raise InputValueError(call, "value", f"{condition}, got {fact}", remedy)
        e = d if self.value is None else self.value.shape[-1]
        if self.noise is not None and self.noise.shape not in ((e, e), (m, e, e)):
            condition = f"noise must be {(e, e)}, the size of the values, or {(m, e, e)}"
            fact = f"shape {shape_of(self.noise)}"
            raise InputValueError(call, "noise", f"{condition}, got {fact}", "Match the output size of the value map.")
        if covariance is not None and covariance.shape != (*mean.shape, d):
            condition, fact = f"slots.covariance must be {(*mean.shape, d)}", f"shape {shape_of(covariance)}"
            raise InputValueError(
                call, "slots.covariance", f"{condition}, got {fact}", "Pass one for each slot, or None."
            )
        if log_pi is not None and log_pi.shape != mean.shape[:-1]:
            condition, fact = f"slots.log_probability must be {tuple(mean.shape[:-1])}", f"shape {shape_of(log_pi)}"
            raise InputValueError(
                call, "slots.log_probability", f"{condition}, got {fact}", "Pass one for each slot, or None."
            )


class LinearLink(NamedTuple):
    """Best linear approximation of the link from means to natural parameters, and its error.   [Eq. (15); theory E57]

    Attributes:
        matrix: B of eta ≈ mu B + offset; in a transformer W_q W_k^T.
        offset: offset of that map.
        r_squared: coefficient of determination of eta.
        divergence: mean of KL(P_eta‖P_linear) over the natural parameters, in nats.
    """

    matrix: Float[Tensor, "d d"]
    offset: Float[Tensor, "d"]
    r_squared: Float[Tensor, ""]
    divergence: Float[Tensor, ""]


@without_autocast
def linear_link(h: Measure, eta: Float[Tensor, "m d"]) -> LinearLink:
    """Fit eta ≈ mu B + offset to the pairs (mu, eta) = (∇G(eta), eta) of a measure by least squares.

    The note conjectures that queries and keys approximate the canonical link of their family linearly. For a Gaussian
    measure the link is linear, B = Sigma⁻¹, and the error is 0. For keys the error grows with the norm of eta.

    >>> import torch
    >>> from gradlogz import Gaussian
    >>> link = linear_link(Gaussian.diagonal(torch.zeros(2), torch.tensor([2.0, 4.0])), torch.randn(20, 2))
    >>> link.matrix.diagonal()
    tensor([0.5000, 0.2500])
    """
    call = "linear_link"
    check_floats(call, eta=eta)
    d = h.dim
    if eta.ndim != 2 or eta.shape[-1] != d or eta.shape[0] <= d + 1:
        condition = f"eta must be [m, d={d}] with more than d + 1 rows"
        raise InputValueError(
            call, "eta", f"{condition}, got shape {shape_of(eta)}", "Pass the natural parameters to fit."
        )
    mu = h.mean(eta)
    centre, middle = mu.mean(0), eta.mean(0)
    # Means may lie in a subspace; torch solves rank-deficient least squares on the CPU only.
    matrix = torch.linalg.pinv(mu - centre) @ (eta - middle)
    offset = middle - centre @ matrix
    fitted = mu @ matrix + offset
    r_squared = 1 - (eta - fitted).square().sum() / (eta - middle).square().sum()
    return LinearLink(matrix, offset, r_squared, h.kl(eta, fitted).mean())
