"""Linear systems that switch between modes.

    P(s_t = j | s_{t-1} = i)     = transition_ij                        a Markov chain of k modes
    p(x_t | x_{t-1}, s_t = j)    = N(F_j x_{t-1} + b_j + B_j u_t, Q_j)  the state
    p(y_t | x_t, s_t = j)        = N(H_j x_t + d_j + D_j u_t, R_j)      what is observed of it              [theory 7]

Rows of the transition matrix sum to one: row i says where mode i goes. One mode is the Kalman model. In continuous
time the same letters are a drift and a density, and modes switch by a generator; what lies between two observations is
moved by the mode of the second:

    dx = (F_j x + b_j + B_j u) dt + dW_j,   W_j of spectral density Q_j;   P(dt) = exp(rate dt)      Generator(rate)

Modes need not have the whole state: mode j has the components E_j^T x, E_j a few columns of the identity. Its matrices
are kept in the size of the whole, E_j F_j E_j^T, so that modes stay stacked.

Read next: discretization.py (the step of a given length), linear_motion.py (the usual models of motion),
nonlinear_model.py, ../gaussian/switching.py (the filters).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import (
    InputTypeError,
    InputValueError,
    check_finite,
    check_floats,
    check_positive_semidefinite,
    has_values,
    shape_of,
)
from ..._pytree import record, static_field
from ..._typing import Bool, Float, Tensor
from ..kalman import LinearizedObservation, Motion, Updated, expect, predict, update
from ..moment_matching import GaussianMoments
from .discretization import discretize, discretize_chain

# The dimensions of one step of each field; what stands before them is time, and targets before time.
ENDS = {
    "transition": "kk",
    "rate": "kk",
    "F": "kss",
    "Q": "kss",
    "H": "kos",
    "R": "koo",
    "b": "ks",
    "d": "ko",
    "B": "ksu",
    "D": "kou",
    "has": "ks",
    "u": "1u",
    "dt": "",
}


@record
class Generator:
    """Generator of the modes in continuous time: mode i switches to mode j at rate_ij, and rows sum to zero.

    It stands where a model of steps has its transition matrix; P(dt) = exp(rate dt).

    >>> import torch
    >>> Generator(torch.tensor([[-0.1, 0.1], [0.2, -0.2]])).rate.shape
    torch.Size([2, 2])
    """

    rate: Float[Tensor, "*#t k k"]

    def __post_init__(self) -> None:
        check_floats("Generator", rate=self.rate)


class KalmanModel(NamedTuple):
    """A linear system of one mode: x' = F x + b + B u + N(0, Q), y = H x + d + D u + N(0, R).

    Fields may begin with a time dimension. If it is continuous, dx = (F x + b + B u) dt + dW with W of density Q.
    """

    F: Float[Tensor, "*#t s s"]
    Q: Float[Tensor, "*#t s s"]
    H: Float[Tensor, "*#t o s"]
    R: Float[Tensor, "*#t o o"]
    b: Float[Tensor, "*#t s"] | None = None
    d: Float[Tensor, "*#t o"] | None = None
    B: Float[Tensor, "*#t s u"] | None = None
    D: Float[Tensor, "*#t o u"] | None = None
    continuous: bool = False


class Parameters(NamedTuple):
    """The fields of a model without inputs, of all steps or of one; `has` where modes fill what others lack."""

    transition: Float[Tensor, "*#t k k"]
    F: Float[Tensor, "*#t k s s"]
    Q: Float[Tensor, "*#t k s s"]
    H: Float[Tensor, "*#t k o s"]
    R: Float[Tensor, "*#t k o o"]
    b: Float[Tensor, "*#t k s"] | None
    d: Float[Tensor, "*#t k o"] | None
    has: Bool[Tensor, "k s"] | None = None

    def each(self, steps: int) -> "Iterator[Parameters]":
        """Those of every step, without time."""
        return (self._replace(**now) for now in each_step(self._asdict(), steps))

    def by_history(self) -> "Parameters":
        """Those of one step for states [*b, h, k, s]: every history by every mode."""
        F, Q, H, R = (t.unsqueeze(-4) for t in (self.F, self.Q, self.H, self.R))
        b, d = (None if t is None else t.unsqueeze(-3) for t in (self.b, self.d))
        return Parameters(self.transition, F, Q, H, R, b, d, self.has)

    # What a filter asks of one step, mode by mode --------------------------------------------------------------------

    def predict(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
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

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """The law of what will be observed."""
        return expect(mean, covariance, H=self.H, R=self.R, d=self.d)

    def difference(self, left: Float[Tensor, "*#b o"], right: Float[Tensor, "*#b o"]) -> Float[Tensor, "*#b o"]:
        """What lies between two observations."""
        return left - right

    # What a smoother asks of one step --------------------------------------------------------------------------------

    def linearize_move(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> Motion:
        """The law of the state one step on, with F and Q."""
        return Motion(self.predict(mean, covariance), self.F, self.Q)

    def linearize_observe(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
    ) -> LinearizedObservation:
        """What an observation differs by from what was expected of it, with H and R."""
        v = observation - (self.H @ mean.unsqueeze(-1)).squeeze(-1)
        return LinearizedObservation(v if self.d is None else v - self.d, self.H, self.R)


@record
class SwitchingModel:
    """k linear systems of one state, and the chain that says which of them moves it.

        P(s_t = j | s_{t-1} = i)    = transition_ij
        p(x_t | x_{t-1}, s_t = j)   = N(F_j x_{t-1} + b_j + B_j u_t, Q_j)
        p(y_t | x_t, s_t = j)       = N(H_j x_t + d_j + D_j u_t, R_j)

    Every field is stacked over modes, [k, ...]; [t, k, ...] changes from step to step, and [*b, t, k, ...] from target
    to target too (sizes of 1 are shared). Covariances may be singular as long as what is observed has a density.
    `validate=False` skips the checks of values, never those of shapes.

    With a `Generator` in place of the transition matrix time is continuous: F, b and B are of the drift, Q is the
    spectral density of the noise, and the series has the times of observations.

        dx = (F_j x + b_j + B_j u) dt + dW_j,   P(dt) = exp(rate dt),   j the mode of the observation that comes next

    With `components`, mode j has only some components of the state; what its matrices say of others is not looked at.
    It keeps them at 0. Where a mode that lacks a component is followed by one that has it, `fill="modes"` takes mean
    and covariance of it from the modes that have it, where one has it as in [yuan12], and `fill="zero"` leaves the 0
    (`fill` in ../moment_matching.py has the formula).

    >>> import torch
    >>> model = SwitchingModel.of(
    ...     [KalmanModel(*torch.ones(4, 1, 1)), KalmanModel(*torch.ones(4, 1, 1))],
    ...     transition=torch.tensor([[0.9, 0.1], [0.3, 0.7]]),
    ... )
    >>> model.modes, model.state_size, model.observation_size, model.steps
    (2, 1, 1, None)
    """

    transition: Float[Tensor, "*#t k k"] | Generator
    F: Float[Tensor, "*#t k s s"]
    Q: Float[Tensor, "*#t k s s"]
    H: Float[Tensor, "*#t k o s"]
    R: Float[Tensor, "*#t k o o"]
    b: Float[Tensor, "*#t k s"] | None = None
    d: Float[Tensor, "*#t k o"] | None = None
    B: Float[Tensor, "*#t k s u"] | None = None
    D: Float[Tensor, "*#t k o u"] | None = None
    components: tuple[tuple[int, ...], ...] | None = static_field(default=None, kw_only=True)
    fill: Literal["modes", "zero"] = static_field(default="modes", kw_only=True)
    validate: bool = static_field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        fields = self.fields()
        check_floats("SwitchingModel", **fields | {name: getattr(self, name) for name in "FQHR"})
        check_fields("SwitchingModel", fields)
        check_components("SwitchingModel", self.components, self.fill, self.modes, self.state_size)
        if self.validate:
            check_finite("SwitchingModel", **fields)
            check_transition("SwitchingModel", self.transition)
            check_positive_semidefinite("SwitchingModel", "Q", self.Q)
            check_positive_semidefinite("SwitchingModel", "R", self.R)

    @classmethod
    @without_autocast
    def of(
        cls,
        models: Sequence[KalmanModel],
        *,
        transition: Float[Tensor, "*#t k k"] | Generator,
        components: Sequence[Sequence[int]] | None = None,
        fill: Literal["modes", "zero"] = "modes",
        validate: bool = True,
    ) -> "SwitchingModel":
        """Models of one state, one for each mode, assembled in this order.

        Args:
            transition: a transition matrix for models of steps, a Generator for models of continuous time.
            components: which components of the whole state each model has, in its order; None if each has all.
            fill: where a component comes from that the mode before did not have.

        >>> import torch
        >>> noise = {"dt": 1.0, "spectral_density": 0.1, "observation_variance": 1.0}
        >>> from gradlogz.filters import constant_acceleration, constant_velocity
        >>> model = SwitchingModel.of(
        ...     [constant_velocity(2, **noise), constant_acceleration(2, **noise)],  # of 4 and of 6 components
        ...     transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
        ...     components=[(0, 1, 3, 4), range(6)],  # of x, x', x'', y, y', y''
        ... )
        >>> model.state_size
        6
        """
        call = "SwitchingModel.of"
        if len(models) == 0 or not all(isinstance(m, KalmanModel) for m in models):
            fact = f"{len(models)} of types {sorted({type(m).__name__ for m in models})}"
            remedy = "Pass a list such as [constant_velocity(...), coordinated_turn(...)]."
            raise InputTypeError(call, "models", f"models must be one KalmanModel or more, got {fact}", remedy)
        continuous = isinstance(transition, Generator)
        if {m.continuous for m in models} != {continuous}:
            fact = f"{sum(m.continuous for m in models)} of {len(models)} that are continuous"
            condition = f"models must be {'continuous with a Generator' if continuous else 'of steps with a matrix'}"
            remedy = "constant_velocity and its like are of steps with dt=, and continuous without it."
            raise InputValueError(call, "models", f"{condition}, got {fact}", remedy)
        own = tuple(tuple(c) for c in components) if components is not None else None
        lifts = lifted(call, [(m.F, m.H.shape[-2]) for m in models], own)
        if lifts is not None:
            models = [_lifted(m, E) for m, E in zip(models, lifts, strict=True)]
        stacked: dict[str, Any] = {
            name: stack_modes([getattr(m, name) for m in models], len(ENDS[name]) - 1)
            for name in KalmanModel._fields
            if name in ENDS
        }
        return cls(transition=transition, components=own, fill=fill, validate=validate, **stacked)

    @property
    def modes(self) -> int:
        """k."""
        return self.R.shape[-3]

    @property
    def continuous(self) -> bool:
        """Whether time is continuous."""
        return isinstance(self.transition, Generator)

    @property
    def state_size(self) -> int:
        """s."""
        return self.F.shape[-1]

    @property
    def observation_size(self) -> int:
        """o."""
        return self.H.shape[-2]

    @property
    def input_size(self) -> int | None:
        """u; None for a model without inputs."""
        matrices = [m for m in (self.B, self.D) if m is not None]
        return matrices[0].shape[-1] if matrices else None

    @property
    def has(self) -> Bool[Tensor, "k s"] | None:
        """Which components of the state each mode has; None if every mode has all."""
        return belonging(self.components, self.R.device)

    @property
    def steps(self) -> int | None:
        """t, the number of steps for which a model that changes in time is given; None where it does not change."""
        return steps_of(self.fields())

    @without_autocast
    def at(self, dt: Float[Tensor, "*#b t"]) -> "SwitchingModel":
        """The model of steps of given lengths, of a model of continuous time; inputs are held during a step.

        Offsets and inputs enter as components that stay: exp([[A, b], [0, 0]] dt) = [[F, ∫ exp(A u) du b], [0, 1]].
        """
        if not isinstance(self.transition, Generator):
            condition, fact = "the model must be one of continuous time", "one with a transition matrix"
            remedy = "Build it with Generator(rate) in its place, and models without dt."
            raise InputValueError("SwitchingModel.at", "model", f"{condition}, got {fact}", remedy)
        s, A = self.state_size, self.F
        held = [t for t in (None if self.b is None else self.b.unsqueeze(-1), self.B) if t is not None]
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (A, self.Q, *held)))
        rows = torch.cat([t.expand(*lead, *t.shape[-3:]) for t in (A, *held)], -1)
        more = rows.shape[-1] - s
        drift = torch.nn.functional.pad(rows, (0, 0, 0, more))
        F, Q = discretize(drift, torch.nn.functional.pad(self.Q, (0, more, 0, more)), dt.unsqueeze(-1))
        first = s + (self.b is not None)
        return dataclasses.replace(
            self,
            transition=discretize_chain(self.transition.rate, dt),
            F=F[..., :s, :s],
            Q=Q[..., :s, :s],
            b=None if self.b is None else F[..., :s, s],
            B=None if self.B is None else F[..., :s, first:],
            validate=False,
        )

    def still_first(self, steps: int) -> "SwitchingModel":
        """The model of so many steps whose first moves nothing: for a prior at the time of the first observation.

        Filters here begin before the first transition; other packages often begin after it.
        """
        if self.continuous:
            condition, fact = "the model must be one of steps", "one of continuous time"
            remedy = "Pass times - times[..., :1]: the first step lasts 0."
            raise InputValueError("SwitchingModel.still_first", "model", f"{condition}, got {fact}", remedy)
        fields: dict[str, Any] = still_first(self.fields(), steps, {"transition", "F"}, {"Q", "b", "B"})
        return dataclasses.replace(self, **fields)

    def parameters(self, inputs: Float[Tensor, "*c t u"] | None = None) -> "Parameters":
        """What a filter needs of the model; inputs become offsets that change in time."""
        assert isinstance(self.transition, Tensor)  # filters discretise before they ask
        offsets = []
        for own, matrix in ((self.b, self.B), (self.d, self.D)):
            if matrix is None or inputs is None:
                offsets.append(own)
            else:
                driven = (matrix @ inputs[..., None, :, None]).squeeze(-1)  # [k, s, u] times [*b, t, 1, u, 1]
                offsets.append(driven if own is None else driven + own)
        b, d = offsets
        F, Q, H, has = self.F, self.Q, self.H, self.has
        if has is not None:
            both = has.unsqueeze(-1) & has.unsqueeze(-2)
            F, Q, H, b = F * both, Q * both, H * has.unsqueeze(-2), None if b is None else b * has
        return Parameters(self.transition, F, Q, H, self.R, b, d, has if self.fill == "modes" else None)

    def narrow(self, time: int) -> "SwitchingModel":
        """The model of one step, its time dimension kept with size 1."""
        if self.steps in (None, 1):
            return self
        return dataclasses.replace(self, **narrowed(self.fields(), time), validate=False)

    def fields(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; `rate` is that of a Generator."""
        return tensors_of(self, ("F", "Q", "H", "R", "b", "d", "B", "D"))


# What models of any kind have in common -------------------------------------------------------------------------------


def check_fields(call: str, fields: dict[str, Tensor]) -> None:
    """Fields are stacked over modes and agree in their sizes."""
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
            raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    lengths = {t.shape[-len(ENDS[name]) - 1] for name, t in fields.items() if t.ndim > len(ENDS[name])} - {1}
    if len(lengths) > 1:
        condition, fact = "fields that change in time must share one number of steps", f"{sorted(lengths)}"
        raise InputValueError(call, "fields", f"{condition}, got {fact}", "Expand or cut one of them.")


def each_step(fields: dict[str, Tensor | None], steps: int) -> Iterator[dict[str, Any]]:
    """Fields of every step, without time."""
    apart: list[Any] = []
    for name, t in fields.items():
        ending = len(ENDS[name])
        if t is None or t.ndim == ending:
            apart.append(itertools.repeat(t, steps))
        else:
            own = t.shape[t.ndim - ending :]
            apart.append(t.expand(*t.shape[: -ending - 1], steps, *own).unbind(-ending - 1))
    return (dict(zip(fields, now, strict=True)) for now in zip(*apart, strict=True))


def steps_of(fields: dict[str, Tensor]) -> int | None:
    """The number of steps of fields of which some change in time."""
    found = [t.shape[-len(ENDS[n]) - 1] for n, t in fields.items() if t.ndim > len(ENDS[n])]
    return max(found) if found else None


def tensors_of(model: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The fields of a model that are tensors, by name, the transition matrix or the rate of a Generator first."""
    T = model.transition
    fields = {"rate": T.rate} if isinstance(T, Generator) else {"transition": T}
    for name in names:
        if (field := getattr(model, name)) is not None:
            fields[name] = field
    return fields


def as_arguments(fields: dict[str, Tensor]) -> dict[str, Any]:
    """Fields by name as the arguments of their model: a rate is that of a Generator."""
    arguments: dict[str, Any] = dict(fields)
    if "rate" in arguments:
        arguments["transition"] = Generator(arguments.pop("rate"))
    return arguments


def narrowed(fields: dict[str, Tensor], time: int) -> dict[str, Any]:
    """One step of fields that may change in time, as a series of one; as arguments of their model."""
    step = {}
    for name, field in fields.items():
        at = -len(ENDS[name]) - 1
        step[name] = field.narrow(at, time, 1) if field.ndim >= -at and field.shape[at] > 1 else field
    return as_arguments(step)


def still_first(fields: dict[str, Tensor], steps: int, ones: set[str], zeros: set[str]) -> dict[str, Tensor]:
    """Fields of so many steps, at the first of which some are the identity and some are 0."""
    changed = {}
    for name, t in fields.items():
        if name not in ones | zeros:
            continue
        at, n = -len(ENDS[name]) - 1, t.shape[-1]
        t = t.expand(*t.shape[:at], steps, *t.shape[at + 1 :])
        first = torch.eye(n, dtype=t.dtype, device=t.device) if name in ones else t.new_zeros(())
        changed[name] = torch.cat((first.expand_as(t.narrow(at, 0, 1)), t.narrow(at, 1, steps - 1)), at)
    return changed


def stack_modes(parts: list[Tensor | None], ending: int) -> Tensor | None:
    """One field of several models, modes before what each of them has; None counts as zero beside others."""
    given = [p for p in parts if p is not None]
    if not given:
        return None
    lead = torch.broadcast_shapes(*(p.shape[: p.ndim - ending] for p in given))
    blank = torch.zeros_like(given[0])
    whole = [blank if p is None else p for p in parts]
    return torch.stack([p.expand(*lead, *p.shape[p.ndim - ending :]) for p in whole], -ending - 1)


def belonging(components: tuple[tuple[int, ...], ...] | None, device: torch.device) -> Tensor | None:
    """Which components of the state each mode has, [k, s]; None if every mode has all."""
    if components is None:
        return None
    s = 1 + max(itertools.chain.from_iterable(components))
    table = torch.tensor([[c in own for c in range(s)] for own in components], device="cpu")
    return table.to(device, non_blocking=True)  # steps of a filter ask for it, and wait for no device


def lifted(
    call: str, sizes: list[tuple[Tensor, int]], components: tuple[tuple[int, ...], ...] | None
) -> list[Tensor] | None:
    """E_j, the columns of the identity that take the state of mode j to the whole; None if each has the whole.

    Modes are given by a matrix of the size of their state, and the size of what they observe.
    """
    states = [F.shape[-1] for F, _ in sizes]
    if len({o for _, o in sizes}) > 1:
        remedy = "Let modes that see less have gaps: NaN where nothing was observed."
        fact = " and ".join(str(o) for _, o in sizes)
        raise InputValueError(call, "models", f"models must have observations of one size, got {fact}", remedy)
    if components is None:
        if len(set(states)) > 1:
            fact = " and ".join(map(str, states))
            condition = "models must have states of one size, or components"
            remedy = "Say which components of the whole state each has: components=[(0, 1, 3, 4), range(6)]."
            raise InputValueError(call, "models", f"{condition}, got {fact}", remedy)
        return None
    if [len(own) for own in components] != states:
        condition = f"components must be as many as each model has, {states}"
        fact = f"{[len(own) for own in components]}"
        raise InputValueError(
            call, "components", f"{condition}, got {fact}", "Count from 0, in the order of the model."
        )
    s = 1 + max(itertools.chain.from_iterable(components))
    pairs = zip(sizes, components, strict=True)
    return [torch.eye(s, dtype=F.dtype, device=F.device)[:, list(own)] for (F, _), own in pairs]


def _lifted(model: KalmanModel, E: Tensor) -> KalmanModel:
    """A model of some components as one of the whole state, which moves nothing else."""
    F, Q, H, _, b, _, B, _, _ = model  # Shorthand
    return model._replace(
        F=E @ F @ E.mT,
        Q=E @ Q @ E.mT,
        H=H @ E.mT,
        b=None if b is None else b @ E.mT,
        B=None if B is None else E @ B,
    )


def check_components(
    call: str, components: tuple[tuple[int, ...], ...] | None, fill: str, modes: int, state_size: int
) -> None:
    """Every mode has some components of the state, each once, and every component belongs to a mode."""
    if fill not in ("modes", "zero"):
        remedy = "What a mode lacked before comes from the modes that have it, or is 0."
        raise InputValueError(call, "fill", f'fill must be "modes" or "zero", got {fill!r}', remedy)
    if components is None:
        return
    all_of_them = set(itertools.chain.from_iterable(components))
    once = all(len(set(own)) == len(own) > 0 for own in components)
    if len(components) != modes or not once or all_of_them != set(range(state_size)):
        condition = f"components must name some of 0 ... {state_size - 1} for each of {modes} modes, and leave out none"
        remedy = "Each mode names a component once; one that no mode has can be left out of the state."
        raise InputValueError(call, "components", f"{condition}, got {components}", remedy)


def check_transition(call: str, transition: Tensor | Generator) -> None:
    """Rows are probabilities, or rates that sum to zero."""
    continuous = isinstance(transition, Generator)
    matrix = transition.rate if isinstance(transition, Generator) else transition
    if not has_values(matrix):
        return
    matrix = matrix.detach()
    tolerance = 1e-5 if matrix.dtype == torch.float32 else 1e-10
    if not continuous:
        worst, least = float((matrix.sum(-1) - 1).abs().max()), float(matrix.min())
        if least < 0 or worst > tolerance:
            fact = f"a smallest entry of {least:.3g} and sums that miss one by {worst:.3g}"
            remedy = (
                "Row i says where mode i goes: pass transition.mT if columns sum to one, or divide rows by their sums."
            )
            condition = "transition must be nonnegative with rows that sum to one"
            raise InputValueError(call, "transition", f"{condition}, got {fact}", remedy)
    else:
        off = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
        worst, least = float(matrix.sum(-1).abs().max()), float(off.min())
        if least < 0 or worst > tolerance * max(1.0, float(off.max())):
            fact = f"a smallest rate of {least:.3g} and sums that miss zero by {worst:.3g}"
            remedy = "Put minus the sum of the other rates of its row on the diagonal."
            condition = "rate must be nonnegative off the diagonal with rows that sum to zero"
            raise InputValueError(call, "rate", f"{condition}, got {fact}", remedy)
