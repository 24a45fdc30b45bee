"""Switching filters for any conjugate family: those of ../gaussian/switching.py beyond Gaussians.

    predict    eta_ij^- = dynamics_j(eta_i)                                             in natural parameters
    update     eta_ij   = eta_ij^- + lik(y),   log L_ij = A(eta_ij) - A(eta_ij^-) + log h0(y)
    weigh      w_ij     ∝ pi_i T_ij L_ij                                                a softmax
    collapse   ∇A(eta_j) = sum_i w_i|j ∇A(eta_ij)                              in expectation parameters  [theory 7.5]

A step adds natural parameters and averages expectation parameters; the link converts between them, as in attention with
queries, keys and the log normaliser. The schemes are those of ../gaussian/switching.py: gpb of any depth, and imm,
which collapses before the prediction. With LinearGaussian both files agree.

Read next: families.py (A, ∇A, its inverse, lik), conjugate_dynamics.py (the dynamics).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import (
    InputValueError,
    check_finite,
    check_floats,
    check_logarithms,
    check_normalized,
    has_values,
    present,
    shape_of,
)
from ..._typing import Bool, Float, Tensor
from ..moment_matching import apart, likelihood_of_modes, posterior, weigh
from ..prior_and_series import Series, as_series, check_mask
from ..validation import LOGARITHMS, observed_mask
from .conjugate_dynamics import Dynamics, LinearMotion, check_dynamics, moved
from .families import ConjugateFamily


class ConjugateState(NamedTuple):
    """State between two steps: natural parameters of mode histories g and log probabilities of histories h."""

    natural: Float[Tensor, "*b g p"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]


class ConjugateFiltered(NamedTuple):
    """Filtered distribution of the parameter x; *b holds targets and, for a series, time.

    Attributes:
        mean: filtered mean of x, all modes combined.
        variance: filtered variance of each coordinate of x, including the spread between modes.
        mode_mean: filtered mean given the current mode, before any collapse.
        mode_variance: filtered variance given the current mode, before any collapse.
        natural: natural parameters of the closest member of the family given the mode, for `family.parameters`.
        log_mode_probability: filtered log probability of each mode, -inf for probability 0.
        predicted_mean: mean before the observation.
        predicted_variance: variance before the observation.
        predicted_log_mode_probability: log probability of each mode before the observation.
        mode_log_likelihood: log p(y_t | s_t, past).
        step_log_likelihood: log p(y_t | past); -inf if no mode can produce y_t, which is then ignored.
        log_likelihood: log p(y_1 ... y_t) of the series; [*b] without time.
    """

    mean: Float[Tensor, "*b s"]
    variance: Float[Tensor, "*b s"]
    mode_mean: Float[Tensor, "*b k s"]
    mode_variance: Float[Tensor, "*b k s"]
    natural: Float[Tensor, "*b k p"]
    log_mode_probability: Float[Tensor, "*b k"]
    predicted_mean: Float[Tensor, "*b s"]
    predicted_variance: Float[Tensor, "*b s"]
    predicted_log_mode_probability: Float[Tensor, "*b k"]
    mode_log_likelihood: Float[Tensor, "*b k"]
    step_log_likelihood: Float[Tensor, "*b"]
    log_likelihood: Float[Tensor, "*c"]


class ConjugateFilter:
    """GPB of any depth and IMM for a conjugate family.

    Args:
        family: the prior and its likelihood, such as GammaPoisson().
        transition: transition matrix [k, k]; rows sum to one.
        dynamics: one for each mode: Discount, Reset, or a LinearMotion under which the family is closed.
        method: "gpb" or "imm".
        depth: depth of "gpb": 1 and 2 are GPB1 and GPB2; above the number of steps it is exact.
        validate: whether values are checked.

    Laws: tests/agreement/test_conjugate_filters_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import Discount, GammaPoisson, Reset
    >>> family = GammaPoisson()
    >>> vague = family.prior(0.5, 0.05)
    >>> transition = torch.tensor([[0.95, 0.05], [0.95, 0.05]])
    >>> bursts = ConjugateFilter(family, transition=transition, dynamics=[Discount(0.98), Reset(vague)])
    >>> filtered = bursts.filter(torch.tensor([[2.0], [3.0], [2.0], [31.0], [28.0]]), vague)
    >>> filtered.log_mode_probability.argmax(-1)  # a new rate at the fourth count
    tensor([0, 0, 0, 1, 0])
    """

    @without_autocast
    def __init__(
        self,
        family: ConjugateFamily,
        *,
        transition: Float[Tensor, "k k"],
        dynamics: Sequence[Dynamics],
        method: Literal["imm", "gpb"] = "gpb",
        depth: int = 2,
        validate: bool = True,
    ) -> None:
        call = "ConjugateFilter"
        check_floats(call, transition=transition)
        k = len(dynamics)
        if transition.shape != (k, k) or k == 0:
            condition = f"transition must be [{k}, {k}] for {k} dynamics"
            remedy = "Pass one Discount, Reset or LinearMotion for each mode."
            raise InputValueError(call, "transition", f"{condition}, got shape {shape_of(transition)}", remedy)
        if method not in ("imm", "gpb") or depth < 1:
            condition, fact = (
                'method must be "imm" or "gpb" and depth at least 1',
                f"method={method!r} and depth={depth}",
            )
            raise InputValueError(call, "method", f"{condition}, got {fact}", "Use depth 1 for GPB1, 2 for GPB2.")
        o = family.observation_size
        one = transition.new_ones(o)
        likelihood_modes = family.likelihood(one, one.bool()).natural.shape[-2]
        if likelihood_modes not in (1, k):
            condition = f"family must have parameters shared by all modes or for each of k={k} modes"
            remedy = "Put modes in the first dimension of its parameters."
            raise InputValueError(call, "family", f"{condition}, got {likelihood_modes}", remedy)
        if validate:
            check_finite(call, transition=transition)
            if has_values(transition) and bool((transition < 0).any()):
                fact = f"{int((transition < 0).sum())} below 0"
                raise InputValueError(
                    call, "transition", f"transition must hold probabilities, got {fact}", "Divide each row by its sum."
                )
            check_normalized(call, "rows of transition", transition.sum(-1).log(), "Divide each row by its sum.")
            for motion in dynamics:
                check_dynamics(call, family, motion)
        self.family, self.transition, self.dynamics = family, transition, tuple(dynamics)
        self.method, self.depth, self.validate = method, depth, validate

    @without_autocast
    def init(
        self,
        prior: Float[Tensor, "*#m p"],
        *,
        log_mode_probability: Float[Tensor, "*#n k"] | None = None,
        batch_shape: tuple[int, ...] = (),
    ) -> ConjugateState:
        """Return the state at time 0, before the first transition, for every target of a batch.

        Args:
            prior: natural parameters from `family.prior`, [p], [k, p] or [*b, k, p].
            log_mode_probability: initial log mode probabilities, [k] or [*b, k]; None is uniform.
            batch_shape: shape of the batch of targets.
        """
        return self._begin("ConjugateFilter.init", torch.Size(batch_shape), prior, log_mode_probability)

    @without_autocast
    def step(
        self,
        state: ConjugateState,
        observation: Float[Tensor, "*b o"],
        *,
        mask: Bool[Tensor, "*b"] | Bool[Tensor, "*b o"] | None = None,
    ) -> tuple[ConjugateState, ConjugateFiltered]:
        """Advance the state by one transition and one observation; `mask` is True where it counts."""
        call = "ConjugateFilter.step"
        if mask is not None:
            check_mask(call, mask, observation)
            mask = mask.unsqueeze(observation.ndim - 1)
        y, observed = self._observed(call, Series(observation.unsqueeze(-2), mask=mask))
        if y.shape[:-2] != state.log_likelihood.shape:
            condition = f"observation must have the target dimensions {tuple(state.log_likelihood.shape)} of the state"
            remedy = "Start with init(batch_shape=...) for a batch of targets."
            raise InputValueError(call, "observation", f"{condition}, got shape {shape_of(observation)}", remedy)
        return self._advance(state, y.squeeze(-2), observed.squeeze(-2))

    @without_autocast
    def filter(
        self,
        observations: Float[Tensor, "*b t o"] | Series,
        prior: Float[Tensor, "*#m p"],
        *,
        log_mode_probability: Float[Tensor, "*#n k"] | None = None,
    ) -> ConjugateFiltered:
        """Filter a series.

        Args:
            observations: [*b, t, o], NaN where missing; or a Series with mask or lengths.
            prior: natural parameters at time 0, before the first transition: [p], [k, p] or [*b, k, p].
            log_mode_probability: initial log mode probabilities, [k] or [*b, k]; None is uniform.
        """
        call = "ConjugateFilter.filter"
        y, observed = self._observed(call, as_series(observations))
        state = self._begin(call, y.shape[:-2], prior, log_mode_probability)
        results = []
        for observation, mask_now in zip(y.unbind(-2), observed.unbind(-2), strict=True):
            state, now = self._advance(state, observation, mask_now)
            results.append(now)
        at = len(y.shape) - 2
        series = ConjugateFiltered(*(torch.stack(parts, at) for parts in zip(*results, strict=True)))
        return series._replace(log_likelihood=state.log_likelihood)

    # Validation -----------------------------------------------------------------------------------------------------

    def _observed(self, call: str, series: Series) -> tuple[Tensor, Bool[Tensor, "*b t o"]]:
        """Observations without NaN, and the mask of observed entries."""
        y, o = series.observations, self.family.observation_size
        check_floats(call, observations=y, transition=self.transition)
        if y.shape[-1] != o:
            condition, remedy = f"observations must be [*b, t, o={o}]", "Match the observation size of the family."
            raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
        if series.inputs is not None or series.times is not None:
            problem = "series may have only observations, mask and lengths, but it has inputs or times"
            raise InputValueError(call, "series", problem, "Drop inputs= and times=.")
        observed = observed_mask(call, series, validate=False)
        observed = torch.ones_like(y, dtype=torch.bool) if observed is None else observed
        if self.family.requires_complete:
            if self.validate and has_values(observed) and bool((observed.any(-1) != observed.all(-1)).any()):
                row = torch.nonzero((observed.any(-1) != observed.all(-1)).flatten())[0].item()
                name = type(self.family).__name__
                problem = f"observations of {name} must be complete or missing as a whole, but number {row} has a gap"
                raise InputValueError(call, "observations", problem, "Set all its entries to NaN, or fill the gap.")
            observed = observed.all(-1, keepdim=True).expand_as(y)
        y = torch.where(observed, y, 1.0 if self.family.support == "positive numbers" else 0.0)
        if self.validate and has_values(y):
            wrong = ~self.family.possible(y)
            if bool(wrong.any()):
                place = tuple(torch.nonzero(wrong)[0].tolist())
                value = float(y[place])
                condition = f"observations of {type(self.family).__name__} must be {self.family.support}, or NaN"
                fact = f"{value:.6g} at {place} ({int(wrong.sum())} in total)"
                raise InputValueError(call, "observations", f"{condition}, got {fact}", "Mask missing observations.")
        return y, observed

    def _begin(self, call: str, batch: torch.Size, prior: Tensor, log_pi: Tensor | None) -> ConjugateState:
        """State at time 0, checked and expanded from the prior."""
        k, p = len(self.dynamics), self.family.size
        check_floats(call, prior=prior, transition=self.transition, **present(log_mode_probability=log_pi))
        full = (*batch, k)
        if prior.shape[-1:] != (p,) or prior.ndim not in (1, 2, len(full) + 1) or not _fits(prior.shape[:-1], full):
            condition = f"prior must be [p={p}], [k={k}, p] or [*b, k, p] with targets {tuple(batch)}"
            remedy = f"Make it with {type(self.family).__name__}.prior."
            raise InputValueError(call, "prior", f"{condition}, got shape {shape_of(prior)}", remedy)
        if self.validate and has_values(prior) and not bool(self.family.in_domain(prior).all()):
            remedy = f"Make it with {type(self.family).__name__}.prior."
            problem = "prior is not normalisable: its natural parameters are outside the domain"
            raise InputValueError(call, "prior", problem, remedy)
        for motion in self.dynamics:
            reset_prior = None if isinstance(motion, LinearMotion) else motion.prior
            if (
                reset_prior is not None
                and reset_prior.ndim > 1
                and (reset_prior.ndim != len(full) or not _fits(reset_prior.shape[:-1], batch))
            ):
                condition = (
                    f"the prior of {type(motion).__name__} must be [p={p}] or [*b, p] with targets {tuple(batch)}"
                )
                remedy = "Pass a prior for each mode to the dynamics of that mode."
                raise InputValueError(call, "prior", f"{condition}, got shape {shape_of(reset_prior)}", remedy)
        if log_pi is None:
            log_pi = torch.zeros_like(prior[..., 0]).new_zeros(full).log_softmax(-1)
        elif log_pi.shape[-1:] != (k,) or log_pi.ndim not in (1, len(full)) or not _fits(log_pi.shape, full):
            condition = f"log_mode_probability must be [k={k}] or [*b, k] with targets {tuple(batch)}"
            raise InputValueError(
                call, "log_mode_probability", f"{condition}, got shape {shape_of(log_pi)}", "Pass None for uniform."
            )
        elif self.validate:
            check_logarithms(call, "log_mode_probability", log_pi)
            check_normalized(call, "exp(log_mode_probability)", log_pi.logsumexp(-1), LOGARITHMS)
        natural, log_pi = prior.expand(*full, p), log_pi.expand(full)
        if self.method == "gpb" and self.depth == 1:
            natural = self.family.collapse(log_pi.exp(), natural).unsqueeze(-2)
        return ConjugateState(natural, log_pi, natural.new_zeros(batch))

    # The steps: mix, predict, update, collapse ----------------------------------------------------------------------

    def _advance(self, state: ConjugateState, y: Tensor, observed: Tensor) -> tuple[ConjugateState, ConjugateFiltered]:
        return self._imm(state, y, observed) if self.method == "imm" else self._gpb(state, y, observed)

    def _imm(self, state: ConjugateState, y: Tensor, observed: Tensor) -> tuple[ConjugateState, ConjugateFiltered]:
        family = self.family
        # Mix: the modes i that may precede each mode j ----------------------------------------------------------------
        log_c, share = weigh(self.transition, state.log_probability.unsqueeze(-1))
        mixed = family.collapse(share.mT, state.natural.unsqueeze(-3).expand(*share.mT.shape, -1))
        # Predict and update: mode by mode ----------------------------------------------------------------------------
        parts = zip(self.dynamics, mixed.split(1, -2), strict=True)
        before = torch.cat([moved(family, motion, natural) for motion, natural in parts], -2)
        after, log_likelihood = self._updated(before, *family.likelihood(y, observed), observed)
        log_pi, step, possible = posterior(log_c, log_likelihood)
        # Collapse: nothing -------------------------------------------------------------------------------------------
        after = torch.where(possible[..., None, None], after, before)
        now = ConjugateFiltered(
            *_mixture(log_pi.exp(), *family.moments(after)),
            *family.moments(after),
            after,
            log_pi,
            *_mixture(log_c.exp(), *family.moments(before)),
            log_c,
            log_likelihood,
            step,
            state.log_likelihood + step,
        )
        return ConjugateState(after, log_pi, now.log_likelihood), now

    def _gpb(self, state: ConjugateState, y: Tensor, observed: Tensor) -> tuple[ConjugateState, ConjugateFiltered]:
        family, k = self.family, len(self.dynamics)
        one = self.depth == 1  # one distribution for all modes
        log_h = state.log_probability.unsqueeze(-1)
        T = self.transition.repeat(log_h.shape[-2] // k, 1)  # by the newest mode of a history
        prior_weights = log_c, shares = weigh(T, log_h)
        # Predict and update: every history by every mode -------------------------------------------------------------
        before = torch.stack([moved(family, motion, state.natural) for motion in self.dynamics], -2)
        natural, log_base = family.likelihood(y, observed)
        after, likelihood = self._updated(before, natural.unsqueeze(-3), log_base.unsqueeze(-2), observed.unsqueeze(-2))
        share = torch.ones_like(likelihood) if one else shares
        mode_likelihood = likelihood.squeeze(-2) if one else likelihood_of_modes(T, log_h, likelihood, prior_weights)
        log_pi, step, possible = posterior(log_c, mode_likelihood)
        after = torch.where(possible[..., None, None, None], after, before)
        likelihood = torch.where(possible[..., None, None], likelihood, 0.0)
        expected = _mixture((share * log_c.exp().unsqueeze(-2)).flatten(-2), *_joined(*family.moments(before)))
        # Report each mode: the mixture of its histories, with weights that include the observation -------------------
        by_mode = torch.ones_like(likelihood) if one else weigh(T, log_h + likelihood).shares
        mean, variance = family.moments(after)
        mode_mean, mode_variance = _mixture(by_mode.mT, mean.movedim(-3, -2), variance.movedim(-3, -2))
        # Collapse: all modes, or the oldest mode of each history -----------------------------------------------------
        if one:
            mode_natural, log_w = after.squeeze(-3), log_pi
            natural = family.collapse(log_pi.exp(), mode_natural).unsqueeze(-2)
        else:
            oldest = k if log_h.shape[-2] * k > k ** (self.depth - 1) else 1
            log_w, shares = weigh(apart(T, oldest, 0), apart(log_h + likelihood, oldest, 0))
            log_w = log_w.log_softmax(-1)
            natural = family.collapse(shares.mT, apart(after, oldest, 1).movedim(-3, -2))
            mode_natural = self._to_modes(log_w, natural)
        now = ConjugateFiltered(
            *_mixture(log_pi.exp(), mode_mean, mode_variance),
            mode_mean,
            mode_variance,
            mode_natural,
            log_pi,
            *expected,
            log_c,
            mode_likelihood,
            step,
            state.log_likelihood + step,
        )
        return ConjugateState(natural, log_w, now.log_likelihood), now

    def _updated(self, before: Tensor, natural: Tensor, log_base: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Add an observation to natural parameters; its log likelihood is a difference of log normalisers."""
        after = before + natural
        family = self.family
        log_likelihood = family.log_normalizer(after) - family.log_normalizer(before) + log_base
        return after, torch.where(observed.any(-1, keepdim=True), log_likelihood, 0.0)

    def _to_modes(self, log_w: Tensor, natural: Tensor) -> Tensor:
        """Collapse histories to one member of the family for each newest mode."""
        k = len(self.dynamics)
        if log_w.shape[-1] == k:
            return natural
        log_w = log_w.unflatten(-1, (-1, k))
        share = weigh(torch.ones_like(log_w), log_w).shares
        return self.family.collapse(share.mT, natural.unflatten(-2, (-1, k)).movedim(-3, -2))


def _fits(shape: torch.Size, full: tuple[int, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False))


def _joined(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    return mean.flatten(-3, -2), variance.flatten(-3, -2)


def _mixture(share: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture of components [*b, n, s]."""
    r = share.unsqueeze(-1)
    m = (r * mean).sum(-2)
    return m, (r * (variance + (mean - m.unsqueeze(-2)) ** 2)).sum(-2)
