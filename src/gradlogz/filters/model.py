"""Linear systems that switch between modes.

    P(s_t = j | s_{t-1} = i)     = transition_ij                        a Markov chain of k modes
    p(x_t | x_{t-1}, s_t = j)    = N(F_j x_{t-1} + b_j + B_j u_t, Q_j)  the state
    p(y_t | x_t, s_t = j)        = N(H_j x_t + d_j + D_j u_t, R_j)      what is observed of it              [theory 7]

Rows of the transition matrix sum to one: row i says where mode i goes. One mode is the Kalman model.

Read next: motion.py (the usual models of motion), switching.py (the filters).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._errors import (
    check_finite,
    check_floats,
    check_positive_semidefinite,
    has_values,
    present,
    sentence,
    shape_of,
)
from .._typing import Bool, Float, Tensor
from ..measures.measure import measure as record  # frozen, final, a pytree: what serves measures serves models
from ..measures.measure import static
from .kalman import Updated, expect, predict, update
from .merging import Moments

# The dimensions of one step of each field; what stands before them is time, and targets before time.
ENDS = {
    "transition": "kk",
    "F": "kss",
    "Q": "kss",
    "H": "kos",
    "R": "koo",
    "b": "ks",
    "d": "ko",
    "B": "ksu",
    "D": "kou",
}


class KalmanModel(NamedTuple):
    """A linear system of one mode: x' = F x + b + B u + N(0, Q), y = H x + d + D u + N(0, R).

    Fields may begin with a time dimension.
    """

    F: Float[Tensor, "*#t s s"]
    Q: Float[Tensor, "*#t s s"]
    H: Float[Tensor, "*#t o s"]
    R: Float[Tensor, "*#t o o"]
    b: Float[Tensor, "*#t s"] | None = None
    d: Float[Tensor, "*#t o"] | None = None
    B: Float[Tensor, "*#t s u"] | None = None
    D: Float[Tensor, "*#t o u"] | None = None


class Parameters(NamedTuple):
    """The fields of a model without inputs, of all steps or of one."""

    transition: Float[Tensor, "*#t k k"]
    F: Float[Tensor, "*#t k s s"]
    Q: Float[Tensor, "*#t k s s"]
    H: Float[Tensor, "*#t k o s"]
    R: Float[Tensor, "*#t k o o"]
    b: Float[Tensor, "*#t k s"] | None
    d: Float[Tensor, "*#t k o"] | None

    def each(self, steps: int) -> "Iterator[Parameters]":
        """Those of every step, without time."""
        fields: list[Any] = []
        for name, t in zip(self._fields, self, strict=True):
            ending = len(ENDS[name])
            if t is None or t.ndim == ending:
                fields.append(itertools.repeat(t, steps))
            else:
                fields.append(t.expand(*t.shape[: -ending - 1], steps, *t.shape[-ending:]).unbind(-ending - 1))
        return itertools.starmap(Parameters, zip(*fields, strict=True))

    def by_history(self) -> "Parameters":
        """Those of one step for states [*b, h, k, s]: every history by every mode."""
        F, Q, H, R = (t.unsqueeze(-4) for t in (self.F, self.Q, self.H, self.R))
        b, d = (None if t is None else t.unsqueeze(-3) for t in (self.b, self.d))
        return Parameters(self.transition, F, Q, H, R, b, d)

    # What a filter asks of one step, mode by mode --------------------------------------------------------------------

    def predict(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> Moments:
        """The law of the state one step on."""
        return predict(mean, covariance, F=self.F, Q=self.Q, b=self.b)

    def update(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
        seen: Bool[Tensor, "*#b #k o"] | None,
    ) -> Updated:
        """The law of the state given an observation, and how likely that was."""
        return update(mean, covariance, observation, H=self.H, R=self.R, d=self.d, seen=seen)

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> Moments:
        """The law of what will be observed."""
        return expect(mean, covariance, H=self.H, R=self.R, d=self.d)


@record
class SwitchingModel:
    """k linear systems of one state, and the chain that says which of them moves it.

        P(s_t = j | s_{t-1} = i)    = transition_ij
        p(x_t | x_{t-1}, s_t = j)   = N(F_j x_{t-1} + b_j + B_j u_t, Q_j)
        p(y_t | x_t, s_t = j)       = N(H_j x_t + d_j + D_j u_t, R_j)

    Every field is stacked over modes, [k, ...]; [t, k, ...] changes from step to step, and [*b, t, k, ...] from target
    to target too (sizes of 1 are shared). Covariances may be singular as long as what is observed has a density.
    `validate=False` skips the checks of values, never those of shapes.

    >>> import torch
    >>> model = SwitchingModel.of(
    ...     [KalmanModel(*torch.ones(4, 1, 1)), KalmanModel(*torch.ones(4, 1, 1))],
    ...     transition=torch.tensor([[0.9, 0.1], [0.3, 0.7]]),
    ... )
    >>> model.modes, model.state_size, model.observation_size, model.steps
    (2, 1, 1, None)
    """

    transition: Float[Tensor, "*#t k k"]
    F: Float[Tensor, "*#t k s s"]
    Q: Float[Tensor, "*#t k s s"]
    H: Float[Tensor, "*#t k o s"]
    R: Float[Tensor, "*#t k o o"]
    b: Float[Tensor, "*#t k s"] | None = None
    d: Float[Tensor, "*#t k o"] | None = None
    B: Float[Tensor, "*#t k s u"] | None = None
    D: Float[Tensor, "*#t k o u"] | None = None
    validate: bool = static(default=True, kw_only=True)

    def __post_init__(self) -> None:
        fields = self._fields()
        check_floats("SwitchingModel", **fields)
        sizes: dict[str, int] = {}
        for name, t in fields.items():
            ending = ENDS[name]
            found = t.shape[t.ndim - len(ending) :] if t.ndim >= len(ending) else ()
            for letter, size in zip(ending, found, strict=False):
                sizes.setdefault(letter, size)
            if tuple(found) != tuple(sizes.get(letter, 0) for letter in ending) or 0 in found:
                wanted = ", ".join(f"{c}={sizes[c]}" if c in sizes else c for c in ending)
                condition = f"{name} must be [*b, t, {wanted}] or without what comes before the modes"
                remedy = "Stack over modes: k first, then what each mode has."
                raise ValueError(sentence("SwitchingModel", condition, f"shape {shape_of(t)}", remedy))
        lengths = {t.shape[-len(ENDS[name]) - 1] for name, t in fields.items() if t.ndim > len(ENDS[name])} - {1}
        if len(lengths) > 1:
            condition, fact = "fields that change in time must share one number of steps", f"{sorted(lengths)}"
            raise ValueError(sentence("SwitchingModel", condition, fact, "Expand or cut one of them."))
        if self.validate:
            check_finite("SwitchingModel", **fields)
            _check_rows(self.transition)
            check_positive_semidefinite("SwitchingModel", "Q", self.Q)
            check_positive_semidefinite("SwitchingModel", "R", self.R)

    @classmethod
    def of(
        cls, models: Sequence[KalmanModel], *, transition: Float[Tensor, "*#t k k"], validate: bool = True
    ) -> "SwitchingModel":
        """Models of one state, one for each mode, assembled in this order."""
        if len(models) == 0 or not all(isinstance(m, KalmanModel) for m in models):
            fact = f"{len(models)} of types {sorted({type(m).__name__ for m in models})}"
            remedy = "Pass a list such as [constant_velocity(...), coordinated_turn(...)]."
            raise TypeError(sentence("SwitchingModel.of", "models must be one KalmanModel or more", fact, remedy))
        if len({(m.F.shape[-1], m.H.shape[-2]) for m in models}) > 1:
            fact = " and ".join(f"{m.F.shape[-1]} and {m.H.shape[-2]}" for m in models)
            condition = "models must have states and observations of one size"
            remedy = "Give a shorter state the derivatives it lacks (constant_velocity has derivatives=)."
            raise ValueError(sentence("SwitchingModel.of", condition, fact, remedy))
        stacked: dict[str, Any] = {
            name: _stacked([getattr(m, name) for m in models], len(ENDS[name]) - 1) for name in list(ENDS)[1:]
        }
        return cls(transition=transition, validate=validate, **stacked)

    @property
    def modes(self) -> int:
        """k."""
        return self.transition.shape[-1]

    @property
    def state_size(self) -> int:
        """s."""
        return self.F.shape[-1]

    @property
    def observation_size(self) -> int:
        """o."""
        return self.H.shape[-2]

    @property
    def steps(self) -> int | None:
        """t, the number of steps for which a model that changes in time is given; None where it does not change."""
        found = [t.shape[-len(ENDS[n]) - 1] for n, t in self._fields().items() if t.ndim > len(ENDS[n])]
        return max(found) if found else None

    def still_first(self, steps: int) -> "SwitchingModel":
        """The model of so many steps whose first moves nothing: for beliefs that describe the first observation's time.

        Filters here begin before the first transition; other packages often begin after it.
        """
        k, s = self.modes, self.state_size
        still = {
            "transition": torch.eye(k, dtype=self.F.dtype, device=self.F.device),
            "F": torch.eye(s, dtype=self.F.dtype, device=self.F.device),
        }
        fields = self._fields()
        for name in ("transition", "F", "Q", "b", "B"):
            if name in fields:
                t, at = fields[name], -len(ENDS[name]) - 1
                t = t.expand(*t.shape[:at], steps, *t.shape[at + 1 :])
                first = still.get(name, torch.zeros((), dtype=t.dtype, device=t.device)).expand_as(t.narrow(at, 0, 1))
                fields[name] = torch.cat((first, t.narrow(at, 1, steps - 1)), at)
        return SwitchingModel(**fields, validate=self.validate)

    def parameters(self, inputs: Float[Tensor, "*c t u"] | None = None) -> "Parameters":
        """What a filter needs of the model; inputs become offsets that change in time."""
        offsets = []
        for own, matrix in ((self.b, self.B), (self.d, self.D)):
            if matrix is None or inputs is None:
                offsets.append(own)
            else:
                driven = (matrix @ inputs[..., None, :, None]).squeeze(-1)  # [k, s, u] times [*b, t, 1, u, 1]
                offsets.append(driven if own is None else driven + own)
        return Parameters(self.transition, self.F, self.Q, self.H, self.R, *offsets)

    def narrow(self, time: int) -> "SwitchingModel":
        """The model of one step, its time dimension kept with size 1."""
        fields = {name: _narrowed(t, len(ENDS[name]), time) for name, t in self._fields().items()}
        return self if self.steps in (None, 1) else SwitchingModel(**fields, validate=False)

    def _fields(self) -> dict[str, Tensor]:
        return present(**{name: getattr(self, name) for name in ENDS})


def _narrowed(field: Tensor, ending: int, time: int) -> Tensor:
    """One step of a field that may change in time, as a series of one."""
    if field.ndim == ending or field.shape[-ending - 1] == 1:
        return field
    return field.narrow(-ending - 1, time, 1)


def _stacked(parts: list[Tensor | None], ending: int) -> Tensor | None:
    """One field of several models, modes before what each of them has; None counts as zero beside others."""
    given = [p for p in parts if p is not None]
    if not given:
        return None
    lead = torch.broadcast_shapes(*(p.shape[: p.ndim - ending] for p in given))
    blank = torch.zeros_like(given[0])
    whole = [blank if p is None else p for p in parts]
    return torch.stack([p.expand(*lead, *p.shape[p.ndim - ending :]) for p in whole], -ending - 1)


def _check_rows(transition: Tensor) -> None:
    """Rows are probabilities."""
    if not has_values(transition):
        return
    worst = float((transition.detach().sum(-1) - 1).abs().max())
    least = float(transition.detach().min())
    if least < 0 or worst > (1e-5 if transition.dtype == torch.float32 else 1e-10):
        fact = f"a smallest entry of {least:.3g} and sums that miss one by {worst:.3g}"
        remedy = "Row i says where mode i goes: pass transition.mT if columns sum to one, or divide rows by their sums."
        condition = "transition must be nonnegative with rows that sum to one"
        raise ValueError(sentence("SwitchingModel", condition, fact, remedy))
