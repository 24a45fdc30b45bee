"""Switching filters of any conjugate family: the filters of ../gaussian/switching.py with other laws than Gaussians.

    predict    eta_ij^- = dynamics_j(eta_i)                                             in natural parameters
    update     eta_ij   = eta_ij^- + lik(y),   log L_ij = A(eta_ij) - A(eta_ij^-) + log h0(y)
    weigh      w_ij     ∝ pi_i T_ij L_ij                                                a softmax
    collapse   ∇A(eta_j) = sum_i w_i|j ∇A(eta_ij)                              in expectation parameters  [theory 7.5]

A step adds in one coordinate system and averages in the other, with the link between them: what attention does with
keys, queries and its log normaliser. The orders are those of ../gaussian/switching.py: gpb of any depth, and imm, which
collapses before it moves. With LinearGaussian they are the filters of ../gaussian/switching.py.

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
from ..validation import LOGARITHMS, seen_of
from .conjugate_dynamics import Dynamics, LinearMotion, check_dynamics, moved
from .families import ConjugateFamily


class ConjugateState(NamedTuple):
    """What is carried from one step to the next: laws of mode histories g and probabilities of histories h."""

    natural: Float[Tensor, "*b g p"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]


class ConjugateFiltered(NamedTuple):
    """The law of the parameter x at each time given all that was observed; *b holds targets and time.

    Attributes:
        mean: of x, all modes combined.
        variance: of each coordinate of x, with the spread between modes.
        mode_mean: given the mode of this time, before any collapse.
        mode_variance: likewise.
        natural: the member of the family nearest to what is known given the mode; `family.parameters` reads it.
        log_mode_probability: of each mode, -inf where it is impossible.
        predicted_mean: the same before the observation of this time.
        predicted_variance: likewise.
        predicted_log_mode_probability: likewise.
        mode_log_likelihood: log p(y_t | s_t, past).
        step_log_likelihood: log p(y_t | past); -inf for what no mode can produce, which then changes nothing.
        log_likelihood: log p(y_1 ... y_t), over the whole series; [*b] without time.
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
    """GPB1, GPB2, deeper ones and IMM for a conjugate family.

    Args:
        family: the prior and its likelihood, such as GammaPoisson().
        transition: [k, k], rows sum to one; row i says where mode i goes.
        dynamics: one for each mode: Discount, Reset, or LinearMotion where it keeps the family.
        method: "gpb" or "imm".
        depth: of "gpb": 1 and 2 are GPB1 and GPB2; above the number of steps it is exact.
        validate: whether values are looked at.

    Laws: tests/agreement/test_conjugate_filters_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import Discount, GammaPoisson, Reset
    >>> family = GammaPoisson()
    >>> vague = family.prior(0.5, 0.05)
    >>> chain = torch.tensor([[0.95, 0.05], [0.95, 0.05]])
    >>> bursts = ConjugateFilter(family, transition=chain, dynamics=[Discount(0.98), Reset(vague)])
    >>> found = bursts.filter(torch.tensor([[2.0], [3.0], [2.0], [31.0], [28.0]]), vague)
    >>> found.log_mode_probability.argmax(-1)  # a new rate at the fourth count
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
            condition = f"transition must be [{k}, {k}], as there are dynamics"
            remedy = "Pass one Discount, Reset or LinearMotion for each mode."
            raise InputValueError(call, "transition", f"{condition}, got shape {shape_of(transition)}", remedy)
        if method not in ("imm", "gpb") or depth < 1:
            condition, fact = 'method must be "imm" or "gpb" and depth at least 1', f"{method!r} and {depth}"
            raise InputValueError(call, "method", f"{condition}, got {fact}", "GPB1 has depth 1, GPB2 has depth 2.")
        o = family.observation_size
        one = transition.new_ones(o)
        own = family.likelihood(one, one.bool()).natural.shape[-2]
        if own not in (1, k):
            condition, remedy = (
                f"family must be one for all modes or have k={k}",
                "Its parameters begin with the modes.",
            )
            raise InputValueError(call, "family", f"{condition}, got {own}", remedy)
        if validate:
            check_finite(call, transition=transition)
            if has_values(transition) and bool((transition < 0).any()):
                fact = f"{int((transition < 0).sum())} below 0"
                raise InputValueError(
                    call, "transition", f"transition must be probabilities, got {fact}", "Rows sum to one."
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
        """The prior at time 0, before the first transition, of every target in a batch.

        Args:
            prior: natural parameters, [p], [k, p] or [*b, k, p]; `family.prior` makes them.
            log_mode_probability: [k] or [*b, k]; None is uniform.
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
        """One transition and one observation."""
        call = "ConjugateFilter.step"
        if mask is not None:
            check_mask(call, mask, observation)
            mask = mask.unsqueeze(observation.ndim - 1)
        y, seen = self._observed(call, Series(observation.unsqueeze(-2), mask=mask))
        if y.shape[:-2] != state.log_likelihood.shape:
            condition = f"observation must have the targets {tuple(state.log_likelihood.shape)} of the state"
            remedy = "Begin with init(batch_shape=...) of its targets."
            raise InputValueError(call, "observation", f"{condition}, got shape {shape_of(observation)}", remedy)
        return self._advance(state, y.squeeze(-2), seen.squeeze(-2))

    @without_autocast
    def filter(
        self,
        observations: Float[Tensor, "*b t o"] | Series,
        prior: Float[Tensor, "*#m p"],
        *,
        log_mode_probability: Float[Tensor, "*#n k"] | None = None,
    ) -> ConjugateFiltered:
        """All steps of a series.

        Args:
            observations: NaN where there are none; or a Series with a mask or lengths.
            prior: natural parameters at time 0, before the first transition: [p], [k, p] or [*b, k, p].
            log_mode_probability: at time 0, [k] or [*b, k]; None is uniform.
        """
        call = "ConjugateFilter.filter"
        y, seen = self._observed(call, as_series(observations))
        state = self._begin(call, y.shape[:-2], prior, log_mode_probability)
        found = []
        for observation, look in zip(y.unbind(-2), seen.unbind(-2), strict=True):
            state, now = self._advance(state, observation, look)
            found.append(now)
        at = len(y.shape) - 2
        series = ConjugateFiltered(*(torch.stack(parts, at) for parts in zip(*found, strict=True)))
        return series._replace(log_likelihood=state.log_likelihood)

    # Validation -----------------------------------------------------------------------------------------------------

    def _observed(self, call: str, series: Series) -> tuple[Tensor, Bool[Tensor, "*b t o"]]:
        """Observations without NaN, and where there is something to see."""
        y, o = series.observations, self.family.observation_size
        check_floats(call, observations=y, transition=self.transition)
        if y.shape[-1] != o:
            condition, remedy = f"observations must be [*b, t, o={o}]", "o is the size of an observation of the family."
            raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
        if series.inputs is not None or series.times is not None:
            condition, fact = "series must have observations, mask and lengths alone", "inputs or times"
            raise InputValueError(
                call, "series", f"{condition}, got {fact}", "Conjugate families have no inputs and no times."
            )
        seen = seen_of(call, series, validate=False)
        seen = torch.ones_like(y, dtype=torch.bool) if seen is None else seen
        if self.family.whole:
            if self.validate and has_values(seen) and bool((seen.any(-1) != seen.all(-1)).any()):
                row = torch.nonzero((seen.any(-1) != seen.all(-1)).flatten())[0].item()
                condition = f"an observation of {type(self.family).__name__} must be seen whole or not at all"
                fact = f"one with a gap, number {row}"
                raise InputValueError(
                    call, "observations", f"{condition}, got {fact}", "Make all of it NaN, or fill the gap."
                )
            seen = seen.all(-1, keepdim=True).expand_as(y)
        y = torch.where(seen, y, 1.0 if self.family.support == "positive numbers" else 0.0)
        if self.validate and has_values(y):
            wrong = ~self.family.possible(y)
            if bool(wrong.any()):
                place = tuple(torch.nonzero(wrong)[0].tolist())
                value = float(y[place])
                condition = f"observations of {type(self.family).__name__} must be {self.family.support}, or NaN"
                fact = f"{value:.6g} at {place}, and {int(wrong.sum())} in all"
                raise InputValueError(call, "observations", f"{condition}, got {fact}", "Mask what was not observed.")
        return y, seen

    def _begin(self, call: str, batch: torch.Size, prior: Tensor, log_pi: Tensor | None) -> ConjugateState:
        """Laws and probabilities of every mode of every target."""
        k, p = len(self.dynamics), self.family.size
        check_floats(call, prior=prior, transition=self.transition, **present(log_mode_probability=log_pi))
        full = (*batch, k)
        if prior.shape[-1:] != (p,) or prior.ndim not in (1, 2, len(full) + 1) or not _fits(prior.shape[:-1], full):
            condition = f"prior must be [p={p}], [k={k}, p] or [*b, k, p] with targets {tuple(batch)}"
            remedy = f"Make it with {type(self.family).__name__}.prior."
            raise InputValueError(call, "prior", f"{condition}, got shape {shape_of(prior)}", remedy)
        if self.validate and has_values(prior) and not bool(self.family.in_domain(prior).all()):
            remedy = f"Make it with {type(self.family).__name__}.prior."
            raise InputValueError(call, "prior", "prior must have a finite mass, got one outside the domain", remedy)
        for motion in self.dynamics:
            own = None if isinstance(motion, LinearMotion) else motion.prior
            if own is not None and own.ndim > 1 and (own.ndim != len(full) or not _fits(own.shape[:-1], batch)):
                condition = (
                    f"the prior of {type(motion).__name__} must be [p={p}] or [*b, p] with targets {tuple(batch)}"
                )
                remedy = "One for each mode belongs to the dynamics of that mode."
                raise InputValueError(call, "prior", f"{condition}, got shape {shape_of(own)}", remedy)
        if log_pi is None:
            log_pi = torch.zeros_like(prior[..., 0]).new_zeros(full).log_softmax(-1)
        elif log_pi.shape[-1:] != (k,) or log_pi.ndim not in (1, len(full)) or not _fits(log_pi.shape, full):
            condition = f"log_mode_probability must be [k={k}] or [*b, k] with targets {tuple(batch)}"
            raise InputValueError(
                call, "log_mode_probability", f"{condition}, got shape {shape_of(log_pi)}", "None is uniform."
            )
        elif self.validate:
            check_logarithms(call, "log_mode_probability", log_pi)
            check_normalized(call, "exp(log_mode_probability)", log_pi.logsumexp(-1), LOGARITHMS)
        natural, log_pi = prior.expand(*full, p), log_pi.expand(full)
        if self.method == "gpb" and self.depth == 1:
            natural = self.family.collapse(log_pi.exp(), natural).unsqueeze(-2)
        return ConjugateState(natural, log_pi, natural.new_zeros(batch))

    # The steps: mix, predict, update, collapse ----------------------------------------------------------------------

    def _advance(self, state: ConjugateState, y: Tensor, seen: Tensor) -> tuple[ConjugateState, ConjugateFiltered]:
        return self._imm(state, y, seen) if self.method == "imm" else self._gpb(state, y, seen)

    def _imm(self, state: ConjugateState, y: Tensor, seen: Tensor) -> tuple[ConjugateState, ConjugateFiltered]:
        family = self.family
        # Mix: each mode j begins with the laws i that may have come to it --------------------------------------------
        log_c, share = weigh(self.transition, state.log_probability.unsqueeze(-1))
        mixed = family.collapse(share.mT, state.natural.unsqueeze(-3).expand(*share.mT.shape, -1))
        # Predict and update: mode by mode ----------------------------------------------------------------------------
        parts = zip(self.dynamics, mixed.split(1, -2), strict=True)
        before = torch.cat([moved(family, motion, natural) for motion, natural in parts], -2)
        after, log_likelihood = self._updated(before, *family.likelihood(y, seen), seen)
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

    def _gpb(self, state: ConjugateState, y: Tensor, seen: Tensor) -> tuple[ConjugateState, ConjugateFiltered]:
        family, k = self.family, len(self.dynamics)
        one = self.depth == 1  # law for all modes
        log_h = state.log_probability.unsqueeze(-1)
        T = self.transition.repeat(log_h.shape[-2] // k, 1)  # by the newest mode of a history
        came = log_c, shares = weigh(T, log_h)
        # Predict and update: every history by every mode -------------------------------------------------------------
        before = torch.stack([moved(family, motion, state.natural) for motion in self.dynamics], -2)
        natural, log_base = family.likelihood(y, seen)
        after, likelihood = self._updated(before, natural.unsqueeze(-3), log_base.unsqueeze(-2), seen.unsqueeze(-2))
        share = torch.ones_like(likelihood) if one else shares
        mode_likelihood = likelihood.squeeze(-2) if one else likelihood_of_modes(T, log_h, likelihood, came)
        log_pi, step, possible = posterior(log_c, mode_likelihood)
        after = torch.where(possible[..., None, None, None], after, before)
        likelihood = torch.where(possible[..., None, None], likelihood, 0.0)
        expected = _mixture((share * log_c.exp().unsqueeze(-2)).flatten(-2), *_joined(*family.moments(before)))
        # What each mode says: all of its histories, by the weights that the observation gave them --------------------
        by_mode = torch.ones_like(likelihood) if one else weigh(T, log_h + likelihood).shares
        mean, variance = family.moments(after)
        mode_mean, mode_variance = _mixture(by_mode.mT, mean.movedim(-3, -2), variance.movedim(-3, -2))
        # Collapse: all modes to one law, or the oldest mode of each history ------------------------------------------
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

    def _updated(self, before: Tensor, natural: Tensor, log_base: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Natural parameters after an observation, and its log likelihood: a difference of log normalisers."""
        after = before + natural
        family = self.family
        log_likelihood = family.log_normalizer(after) - family.log_normalizer(before) + log_base
        return after, torch.where(seen.any(-1, keepdim=True), log_likelihood, 0.0)

    def _to_modes(self, log_w: Tensor, natural: Tensor) -> Tensor:
        """Histories as one law for each of their newest modes."""
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
    """Mean and variance of a mixture [*b, n, s]."""
    r = share.unsqueeze(-1)
    m = (r * mean).sum(-2)
    return m, (r * (variance + (mean - m.unsqueeze(-2)) ** 2)).sum(-2)
