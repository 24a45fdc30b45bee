"""Switching linear systems.

    P(s_t = j | s_{t-1} = i)     = transition_ij                        mode: a Markov chain with k states
    p(x_t | x_{t-1}, s_t = j)    = N(F_j x_{t-1} + b_j + B_j u_t, Q_j)  state
    p(y_t | x_t, s_t = j)        = N(H_j x_t + d_j + D_j u_t, R_j)      observation                         [theory 7]

Row i of the transition matrix holds the probabilities of the next mode after mode i. One mode is the Kalman model. In
continuous time F is the drift, Q the spectral density, and modes switch by a generator; the mode of the later of two
observations governs the interval between them:

    dx = (F_j x + b_j + B_j u) dt + dW_j,   W_j of spectral density Q_j;   P(dt) = exp(rate dt)      Generator(rate)

A mode may have only some components of the state, E_j^T x, where E_j are columns of the identity. Its matrices are
stored in full size, E_j F_j E_j^T, so that modes can be stacked.

Read next: discretization.py (continuous time), linear_motion.py (motion models), nonlinear_model.py,
../gaussian/switching.py (the filters).
"""

import dataclasses
import functools
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
    present,
    shape_of,
)
from ..._pytree import record, replaced, static_field
from ..._typing import Bool, Float, Tensor
from ..kalman import LinearizedObservation, Motion, Updated, expect, predict, update
from ..moment_matching import GaussianMoments, symmetrized
from ..records import TensorRecord
from ..scalars import from_arrays
from .discretization import discretize_chain_steps, discretize_steps

# Dimensions of one step of each field; time and then targets may precede them.
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
class Generator(TensorRecord):
    """Generator of the modes in continuous time: mode i switches to mode j at rate_ij, and rows sum to zero.

    Pass it to a model in place of the transition matrix; P(dt) = exp(rate dt).

    >>> import torch
    >>> Generator(torch.tensor([[-0.1, 0.1], [0.2, -0.2]])).rate.shape
    torch.Size([2, 2])
    """

    rate: Float[Tensor, "*#t k k"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", from_arrays({"rate": self.rate})["rate"])
        check_floats("Generator", rate=self.rate)


class KalmanModel(NamedTuple):
    """One linear mode: x' = F x + b + B u + N(0, Q), y = H x + d + D u + N(0, R).

    Fields may start with a time dimension. They may be numpy arrays, and numbers for matrices of size 1.
    If `continuous`, dx = (F x + b + B u) dt + dW, W of spectral density Q.
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
    """Fields of a model with inputs absorbed into b and d, for all steps or one; `has` is set if `fill` is "modes"."""

    transition: Float[Tensor, "*#t k k"]
    F: Float[Tensor, "*#t k s s"]
    Q: Float[Tensor, "*#t k s s"]
    H: Float[Tensor, "*#t k o s"]
    R: Float[Tensor, "*#t k o o"]
    b: Float[Tensor, "*#t k s"] | None
    d: Float[Tensor, "*#t k o"] | None
    has: Bool[Tensor, "k s"] | None = None

    def each(self, steps: int) -> "Iterator[Parameters]":
        """Yield the parameters of every step, without time."""
        return (self._replace(**now) for now in each_step(self._asdict(), steps))

    def by_history(self) -> "Parameters":
        """Parameters of one step for states [*b, h, k, s]: every history by every mode."""
        F, Q, H, R = (t.unsqueeze(-4) for t in (self.F, self.Q, self.H, self.R))
        b, d = (None if t is None else t.unsqueeze(-3) for t in (self.b, self.d))
        return Parameters(self.transition, F, Q, H, R, b, d, self.has)

    # Operations of a filter, mode by mode ----------------------------------------------------------------------------

    def predict(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """Predicted moments of the next state."""
        return predict(mean, covariance, F=self.F, Q=self.Q, b=self.b)

    def update(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
        observed: Bool[Tensor, "*#b #k o"] | None,
    ) -> Updated:
        """Condition the state on an observation; also returns its log likelihood."""
        return update(mean, covariance, observation, H=self.H, R=self.R, d=self.d, observed=observed)

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """Predicted moments of the observation."""
        return expect(mean, covariance, H=self.H, R=self.R, d=self.d)

    def difference(self, left: Float[Tensor, "*#b o"], right: Float[Tensor, "*#b o"]) -> Float[Tensor, "*#b o"]:
        """Difference of two observations."""
        return left - right

    # Operations of a smoother ----------------------------------------------------------------------------------------

    def linearize_move(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> Motion:
        """Predicted moments of the next state, with F and Q."""
        return Motion(self.predict(mean, covariance), self.F, self.Q)

    def linearize_observe(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
    ) -> LinearizedObservation:
        """Innovation, with H and R."""
        v = observation - (self.H @ mean.unsqueeze(-1)).squeeze(-1)
        return LinearizedObservation(v if self.d is None else v - self.d, self.H, self.R)


@record
class SwitchingModel(TensorRecord):
    """Switching linear system with k modes of one state.

        P(s_t = j | s_{t-1} = i)    = transition_ij
        p(x_t | x_{t-1}, s_t = j)   = N(F_j x_{t-1} + b_j + B_j u_t, Q_j)
        p(y_t | x_t, s_t = j)       = N(H_j x_t + d_j + D_j u_t, R_j)

    Fields are stacked over modes: [k, ...], or [t, k, ...] if they vary with time, or [*b, t, k, ...] if they also
    differ between targets (dimensions of size 1 broadcast). One leading dimension is time; if there are as many targets
    as steps, filters refuse it unless `per="time"` confirms it. `per="target"` makes it one model for each target:
    [*b, k, ...] becomes [*b, 1, k, ...]. Covariances may be singular as long as H P H^T + R is
    positive definite. Fields may be numpy arrays, which are copied; dtypes must agree. Asymmetry of Q and R below
    sqrt(eps) of their largest entry is removed. `validate=False` skips checks of values, not of shapes.

    With a `Generator` in place of the transition matrix time is continuous: F, b and B define the drift, Q is the
    spectral density of the noise, and the series has `times`.

        dx = (F_j x + b_j + B_j u) dt + dW_j,   P(dt) = exp(rate dt),   j the mode of the next observation

    With `components`, mode j has only some components of the state; its other matrix entries are ignored and its other
    components are 0. When a mode gains a component that the previous mode lacked, `fill="modes"` takes mean and
    covariance from the modes that have it, as in [yuan12] if there is only one (formula: `fill` in
    ../moment_matching.py), and `fill="zero"` keeps 0.

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
    per: Literal["time", "target"] | None = static_field(default=None, kw_only=True)
    validate: bool = static_field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        convert_fields(self, ("transition", "F", "Q", "H", "R", "b", "d", "B", "D"))
        lead_by_target("SwitchingModel", self)
        fields = self.fields()
        check_floats("SwitchingModel", **fields | {name: getattr(self, name) for name in "FQHR"})
        check_fields("SwitchingModel", fields)
        check_components("SwitchingModel", self.components, self.fill, self.modes, self.state_size)
        if self.validate:
            check_finite("SwitchingModel", **fields)
            check_transition("SwitchingModel", self.transition)
            check_covariances("SwitchingModel", self)

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
        """Assemble a model from its modes, in this order.

        Args:
            models: the modes.
            transition: transition matrix for discrete-time modes, Generator for continuous-time modes.
            components: indices of the full state that each mode has, in its order; None if each has all.
            fill: source of a component that the previous mode lacked: the other modes, or zero.
            validate: whether values are checked.

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
            raise InputTypeError(call, "models", f"models must be a list of KalmanModel, got {fact}", remedy)
        continuous = isinstance(transition, Generator)
        if {m.continuous for m in models} != {continuous}:
            dynamics = "a Generator" if continuous else "a transition matrix"
            needs = "continuous" if continuous else "discrete"
            fact = f"{sum(m.continuous for m in models)} of {len(models)} are continuous"
            remedy = (
                "For a Generator build motion models without dt=, and your own with KalmanModel(..., continuous=True)."
                if continuous
                else "For a transition matrix build motion models with dt=, and your own without continuous=True."
            )
            raise InputValueError(call, "models", f"models must be {needs} with {dynamics}, but {fact}", remedy)
        models = as_modes(call, models, transition)
        index_sets = tuple(tuple(c) for c in components) if components is not None else None
        lifts = embeddings(call, [(m.F, m.H.shape[-2]) for m in models], index_sets)
        if lifts is not None:
            models = [_embed(m, E) for m, E in zip(models, lifts, strict=True)]
        stacked: dict[str, Any] = {
            name: stack_modes([getattr(m, name) for m in models], len(ENDS[name]) - 1)
            for name in KalmanModel._fields
            if name in ENDS
        }
        return cls(transition=transition, components=index_sets, fill=fill, validate=validate, **stacked)

    @property
    def modes(self) -> int:
        """k."""
        return self.R.shape[-3]

    @property
    def continuous(self) -> bool:
        """True if time is continuous."""
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
        """Mask [k, s] of the components that each mode has; None if every mode has all."""
        return component_mask(self.components, self.R.device)

    @property
    def steps(self) -> int | None:
        """Number of steps t of a time-varying model; None if the model is constant."""
        return steps_of(self.fields())

    @without_autocast
    def at(self, dt: Float[Tensor, "*#b t"]) -> "SwitchingModel":
        """Discretise a continuous-time model for steps of length dt; inputs are held during a step.

        Offsets and inputs enter as constant components: exp([[A, b], [0, 0]] dt) = [[F, ∫ exp(A u) du b], [0, 1]].
        """
        if not isinstance(self.transition, Generator):
            problem = "the model must be continuous in time, but it has a transition matrix"
            remedy = "Build it with Generator(rate) and modes without dt."
            raise InputValueError("SwitchingModel.at", "model", problem, remedy)
        s, A, C = self.state_size, self.F, self.Q
        held = [t for t in (None if self.b is None else self.b.unsqueeze(-1), self.B) if t is not None]
        if held:
            lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (A, C, *held)))
            rows = torch.cat([t.expand(*lead, *t.shape[-3:]) for t in (A, *held)], -1)
            more = rows.shape[-1] - s
            A, C = torch.nn.functional.pad(rows, (0, 0, 0, more)), torch.nn.functional.pad(C, (0, more, 0, more))
        F, Q = discretize_steps(A, C, dt)
        if held:
            first = s + (self.b is not None)
            held_fields = {
                "b": None if self.b is None else F[..., :s, s],
                "B": None if self.B is None else F[..., :s, first:],
            }
            F, Q = F[..., :s, :s], Q[..., :s, :s]
        else:
            held_fields = {}
        return replaced(
            self,
            transition=discretize_chain_steps(self.transition.rate, dt),
            F=F,
            Q=Q,
            **held_fields,
            per="time",
            validate=False,
        )

    def still_first(self, steps: int) -> "SwitchingModel":
        """Model with the given number of steps whose first step leaves state and mode unchanged.

        Use it if the prior is at the time of the first observation. The filters here assume a prior before the first
        transition.
        """
        if self.continuous:
            problem = "the model must be discrete in time, but it has a Generator"
            remedy = "Pass times - times[..., :1], so that the first step has length 0."
            raise InputValueError("SwitchingModel.still_first", "model", problem, remedy)
        fields: dict[str, Any] = still_first(self.fields(), steps, {"transition", "F"}, {"Q", "b", "B"})
        return dataclasses.replace(self, **fields, per="time")

    def parameters(self, inputs: Float[Tensor, "*c t u"] | None = None) -> "Parameters":
        """Tensors that the steps of a filter need; inputs become time-varying offsets."""
        assert isinstance(self.transition, Tensor)  # filters discretise first
        offsets = []
        for offset, matrix in ((self.b, self.B), (self.d, self.D)):
            if matrix is None or inputs is None:
                offsets.append(offset)
            else:
                driven = (matrix @ inputs[..., None, :, None]).squeeze(-1)  # [k, s, u] times [*b, t, 1, u, 1]
                offsets.append(driven if offset is None else driven + offset)
        b, d = offsets
        F, Q, H, has = self.F, self.Q, self.H, self.has
        if has is not None:
            both = has.unsqueeze(-1) & has.unsqueeze(-2)
            F, Q, H, b = F * both, Q * both, H * has.unsqueeze(-2), None if b is None else b * has
        return Parameters(self.transition, F, Q, H, self.R, b, d, has if self.fill == "modes" else None)

    def narrow(self, time: int) -> "SwitchingModel":
        """Model of one step, with a time dimension of size 1."""
        if self.steps in (None, 1):
            return self
        return dataclasses.replace(self, **narrowed(self.fields(), time), validate=False)

    def fields(self) -> dict[str, Tensor]:
        """Tensor fields by name; `rate` is that of a Generator."""
        return tensors_of(self, ("F", "Q", "H", "R", "b", "d", "B", "D"))


# Shared by linear and nonlinear models --------------------------------------------------------------------------------


def convert_fields(model: Any, names: tuple[str, ...]) -> None:
    """Convert numpy arrays and numbers among the fields of a new model to tensors."""
    values = {name: getattr(model, name) for name in names}
    for name, t in from_arrays(values, {name: len(ENDS[name]) for name in names}).items():
        if t is not values[name]:
            object.__setattr__(model, name, t)


def as_modes(call: str, models: Sequence[Any], transition: Any) -> list[Any]:
    """Modes with numpy arrays and numbers converted to tensors, all of one dtype; a number is a 1 by 1 matrix.

    Without any array among the modes, numbers take the dtype of the transition matrix.
    """
    names = [(j, name) for j, m in enumerate(models) for name in m._fields if name in ENDS]
    values = {f"models[{j}].{name}": getattr(models[j], name) for j, name in names}
    sizes = {f"models[{j}].{name}": len(ENDS[name]) - 1 for j, name in names}
    rates = transition.rate if isinstance(transition, Generator) else transition
    tensors = from_arrays({**values, "transition": rates}, sizes)
    del tensors["transition"]  # converted and checked with the model
    check_floats(call, **present(**tensors))
    changes: list[dict[str, Any]] = [{} for _ in models]
    for (j, name), t in zip(names, tensors.values(), strict=True):
        changes[j][name] = t
    return [m._replace(**change) for m, change in zip(models, changes, strict=True)]


def lead_by_target(call: str, model: Any) -> None:
    """Give the fields of a new model with per="target" a time dimension of size 1 after those of targets."""
    if model.per not in (None, "time", "target"):
        condition, remedy = 'per must be "time" or "target"', "Leave it out if there is no leading dimension."
        raise InputValueError(call, "per", f"{condition}, got {model.per!r}", remedy)
    if model.per != "target":
        return
    fields = {
        name: t.unsqueeze(-len(ENDS[name]) - 1) if t.ndim > len(ENDS[name]) else t for name, t in model.fields().items()
    }
    for name, field in (as_arguments(fields) | {"per": None}).items():
        object.__setattr__(model, name, field)


def check_covariances(call: str, model: Any) -> None:
    """Check Q and R of a new model; asymmetry of the size of rounding is removed."""
    for name in ("Q", "R"):
        if (covariance := symmetrized(getattr(model, name))) is not getattr(model, name):
            object.__setattr__(model, name, covariance)
        check_positive_semidefinite(call, name, covariance)


def check_fields(call: str, fields: dict[str, Tensor]) -> None:
    """Check that fields are stacked over modes and agree in their sizes."""
    sizes: dict[str, int] = {}
    for name, t in fields.items():
        ending = ENDS[name]
        dimensions = t.shape[t.ndim - len(ending) :] if t.ndim >= len(ending) else ()
        for letter, size in zip(ending, dimensions, strict=False):
            sizes.setdefault(letter, size)
        if tuple(dimensions) != tuple(sizes.get(letter, 0) for letter in ending) or 0 in dimensions:
            wanted = ", ".join(f"{c}={sizes[c]}" if c in sizes else c for c in ending)
            condition = f"{name} must be [{wanted}], [t, {wanted}] or [*b, t, {wanted}]"
            remedy = "Stack the modes in dimension k."
            raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    lengths = {t.shape[-len(ENDS[name]) - 1] for name, t in fields.items() if t.ndim > len(ENDS[name])} - {1}
    if len(lengths) > 1:
        condition, fact = "time-varying fields must have the same number of steps", f"{sorted(lengths)}"
        raise InputValueError(call, "fields", f"{condition}, got {fact}", "Expand or shorten one of them.")


def each_step(fields: dict[str, Tensor | None], steps: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of every step, without time."""
    apart: list[Any] = []
    for name, t in fields.items():
        ending = len(ENDS[name])
        if t is None or t.ndim == ending:
            apart.append(itertools.repeat(t, steps))
        else:
            dimensions = t.shape[t.ndim - ending :]
            apart.append(t.expand(*t.shape[: -ending - 1], steps, *dimensions).unbind(-ending - 1))
    return (dict(zip(fields, now, strict=True)) for now in zip(*apart, strict=True))


def steps_of(fields: dict[str, Tensor]) -> int | None:
    """Number of steps of time-varying fields; None if all are constant."""
    lengths = [t.shape[-len(ENDS[n]) - 1] for n, t in fields.items() if t.ndim > len(ENDS[n])]
    return max(lengths) if lengths else None


def tensors_of(model: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Tensor fields of a model by name, starting with the transition matrix or the rate of a Generator."""
    T = model.transition
    fields = {"rate": T.rate} if isinstance(T, Generator) else {"transition": T}
    for name in names:
        if (field := getattr(model, name)) is not None:
            fields[name] = field
    return fields


def as_arguments(fields: dict[str, Tensor]) -> dict[str, Any]:
    """Convert fields by name to arguments of their model; a rate becomes a Generator."""
    arguments: dict[str, Any] = dict(fields)
    if "rate" in arguments:
        arguments["transition"] = Generator(arguments.pop("rate"))
    return arguments


def narrowed(fields: dict[str, Tensor], time: int) -> dict[str, Any]:
    """Select one step of the fields, with a time dimension of size 1, as arguments of their model."""
    step = {}
    for name, field in fields.items():
        at = -len(ENDS[name]) - 1
        step[name] = field.narrow(at, time, 1) if field.ndim >= -at and field.shape[at] > 1 else field
    return as_arguments(step)


def still_first(fields: dict[str, Tensor], steps: int, ones: set[str], zeros: set[str]) -> dict[str, Tensor]:
    """Fields for the given number of steps; at the first one `ones` are the identity and `zeros` are 0."""
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
    """Stack one field of several models over modes; None counts as zero unless all are None."""
    present = [p for p in parts if p is not None]
    if not present:
        return None
    lead = torch.broadcast_shapes(*(p.shape[: p.ndim - ending] for p in present))
    blank = torch.zeros_like(present[0])
    filled = [blank if p is None else p for p in parts]
    return torch.stack([p.expand(*lead, *p.shape[p.ndim - ending :]) for p in filled], -ending - 1)


def component_mask(components: tuple[tuple[int, ...], ...] | None, device: torch.device) -> Tensor | None:
    """Mask [k, s] of the components that each mode has; None if every mode has all."""
    if components is None:
        return None
    return (
        _mask(components, device) if device.type != "cpu" or torch.compiler.is_compiling() else _mask_on_cpu(components)
    )


@functools.cache
def _mask_on_cpu(components: tuple[tuple[int, ...], ...]) -> Tensor:
    """The mask, remembered: it is needed in every step."""
    with torch.inference_mode(False):
        return _mask(components, torch.device("cpu"))


def _mask(components: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    s = 1 + max(itertools.chain.from_iterable(components))
    table = torch.tensor([[c in indices for c in range(s)] for indices in components], device="cpu")
    return table.to(device, non_blocking=True)  # no synchronisation in the steps of a filter


def embeddings(
    call: str, sizes: list[tuple[Tensor, int]], components: tuple[tuple[int, ...], ...] | None
) -> list[Tensor] | None:
    """Matrices E_j, columns of the identity, that embed the state of mode j in the full state; None if all are full.

    `sizes` holds for each mode a matrix of its state size and its observation size.
    """
    states = [F.shape[-1] for F, _ in sizes]
    if len({o for _, o in sizes}) > 1:
        remedy = "Use the largest observation, with NaN for components that are not observed."
        fact = " and ".join(str(o) for _, o in sizes)
        raise InputValueError(call, "models", f"models must have the same observation size, got {fact}", remedy)
    if components is None:
        if len(set(states)) > 1:
            fact = " and ".join(map(str, states))
            condition = "models must have the same state size unless components= is given"
            remedy = "List the components of the full state that each mode has: components=[(0, 1, 3, 4), range(6)]."
            raise InputValueError(call, "models", f"{condition}, got {fact}", remedy)
        return None
    if [len(indices) for indices in components] != states:
        condition = f"components must list as many indices as each model has components, {states}"
        fact = f"{[len(indices) for indices in components]}"
        raise InputValueError(
            call, "components", f"{condition}, got {fact}", "List indices from 0, in the order of the model."
        )
    s = 1 + max(itertools.chain.from_iterable(components))
    pairs = zip(sizes, components, strict=True)
    return [torch.eye(s, dtype=F.dtype, device=F.device)[:, list(indices)] for (F, _), indices in pairs]


def _embed(model: KalmanModel, E: Tensor) -> KalmanModel:
    """Embed a mode of some components in the full state; the other components become 0."""
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
    """Check that every mode has distinct components and that every component belongs to a mode."""
    if fill not in ("modes", "zero"):
        remedy = "Use modes to fill in missing components from the other modes, zero to keep 0."
        raise InputValueError(call, "fill", f'fill must be "modes" or "zero", got {fill!r}', remedy)
    if components is None:
        return
    all_of_them = set(itertools.chain.from_iterable(components))
    once = all(len(set(indices)) == len(indices) > 0 for indices in components)
    if len(components) != modes or not once or all_of_them != set(range(state_size)):
        condition = f"components must list indices from 0 to {state_size - 1} for each of {modes} modes, and use all"
        remedy = "List each index once for each mode, and drop components that no mode has."
        raise InputValueError(call, "components", f"{condition}, got {components}", remedy)


def check_transition(call: str, transition: Tensor | Generator) -> None:
    """Check that rows are probabilities, or for a Generator rates that sum to zero."""
    continuous = isinstance(transition, Generator)
    matrix = transition.rate if isinstance(transition, Generator) else transition
    if not has_values(matrix):
        return
    matrix = matrix.detach()
    tolerance = 1e-5 if matrix.dtype == torch.float32 else 1e-10
    if not continuous:
        worst, least = float((matrix.sum(-1) - 1).abs().max()), float(matrix.min())
        if least < 0 or worst > tolerance:
            fact = f"the smallest entry is {least:.3g} and row sums differ from one by up to {worst:.3g}"
            remedy = "Pass transition.mT if columns sum to one, or divide each row by its sum."
            condition = "transition must be nonnegative with rows that sum to one"
            raise InputValueError(call, "transition", f"{condition}, but {fact}", remedy)
    else:
        off = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
        worst, least = float(matrix.sum(-1).abs().max()), float(off.min())
        if least < 0 or worst > tolerance * max(1.0, float(off.max())):
            fact = f"the smallest rate is {least:.3g} and row sums differ from zero by up to {worst:.3g}"
            remedy = "Set each diagonal entry to minus the sum of the other rates in its row."
            condition = "rate must be nonnegative off the diagonal with rows that sum to zero"
            raise InputValueError(call, "rate", f"{condition}, but {fact}", remedy)


torch.serialization.add_safe_globals([Generator, KalmanModel, SwitchingModel])  # for torch.load with weights_only=True
