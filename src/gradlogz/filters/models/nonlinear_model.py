"""Systems that switch between modes and need not be linear: the extended and the unscented Kalman filter.

    p(x_t | x_{t-1}, s_t = j) = N(f_j(x_{t-1}), Q_j),        p(y_t | x_t, s_t = j) = N(h_j(x_t), R_j)

A Gaussian N(m, P) with P = L L^T goes through a function f as if that were linear: f(m + L z) ≈ m' + G z + N(0, W).

    "ekf"   the tangent        m' = f(m),   G = f'(m) L,   W = 0                        f' by forward differentiation
    "ukf"   sigma points       m ± c L_i,   c² = alpha² (n + kappa)                                  [julier04; wan00]
            m'  = f(m) + sum_i (f_i+ + f_i- - 2 f(m)) / 2 c²,           f_i± = f(m ± c L_i)
            G_i = (f_i+ - f_i-) / 2 c                                                       differences of first order
            W   = sum_i e_i e_i^T / c² + (2 - n / c² - alpha² + beta) e_0 e_0^T             what curvature adds
            e_i = (f_i+ + f_i-) / 2 - m',   e_0 = f(m) - m'

These are the usual weighted sums over 2 n + 1 points, sorted into what is odd and what is even: linear functions have
W = 0 and give the Kalman filter, and a covariance is a sum of squares. The rest is that filter in the coordinates z. L
is Cholesky's root, of singular covariances too. With alpha = 1, kappa = 0, beta = 2 all weights are nonnegative.

In continuous time a function is told how long it moves the state, f_j(x, dt), and noise has a density: what it adds to
is ∫ Phi C Phi^T over the step, Phi the tangents of what is left of it (discretization.py).

Smoothers ask for cov(x, f) = P A^T too: A = f'(m), or A L = G [sarkka08]. Any such A will do where P is singular.

Read next: nonlinear_motion.py (turns of unknown rate, ranges and bearings), ../gaussian/switching.py (the filters),
../gaussian/backward_messages.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from ..._typing import Bool, Float, Int, Tensor
from ..kalman import LinearizedObservation, Motion, Updated, correct
from ..moment_matching import GaussianMoments, symmetric
from .discretization import NODES, diffuse, discretize_chain, exponential
from .switching_model import (
    Generator,
    KalmanModel,
    belonging,
    check_components,
    check_fields,
    check_transition,
    each_step,
    lifted,
    narrowed,
    stack_modes,
    steps_of,
    tensors_of,
)

Function = Callable[..., Tensor]  # of one state [s]; of a state and an input [u]; in continuous time with dt between
Mapped = Callable[..., tuple[Tensor, ...]]
NOT_FINITE = 1 << 20  # the code of a function that has no value or no derivative, above those of Cholesky's method
Residual = Callable[[Tensor, Tensor], Tensor]  # what lies between two observations [o]


class NonlinearMode(NamedTuple):
    """One mode: x' = move(x) + N(0, Q), y = observe(x) + N(0, R). Functions are of one state [s], in torch.

    If it is continuous, move(x, dt) is where x is a time dt later but for noise, whose spectral density is Q.
    """

    move: Function
    Q: Float[Tensor, "*#t s s"]
    observe: Function
    R: Float[Tensor, "*#t o o"]
    continuous: bool = False


@record
class NonlinearModel:
    """k systems of one state that need not be linear, and the chain that says which of them moves it.

        P(s_t = j | s_{t-1} = i)    = transition_ij
        p(x_t | x_{t-1}, s_t = j)   = N(move_j(x_{t-1}, u_t), Q_j)
        p(y_t | x_t, s_t = j)       = N(observe_j(x_t, u_t), R_j)

    Every filter takes it where it takes a SwitchingModel. Fields may change in time, as those do; functions are told
    of time by their inputs, which they have as a last argument if input_size is given.

    With a `Generator` in place of the transition matrix time is continuous: move(x, dt) is where a state is a time dt
    later but for noise, Q is the spectral density of the noise, and the series has the times of observations. Noise is
    moved by the tangents of the flow; follow_drift makes a flow of a drift.

    Attributes:
        move: a function of one state [s], for all modes or one for each; it is mapped over targets (torch.func.vmap).
        observe: likewise, [s] to [o].
        dt: how long each step is, of flows beside a transition matrix; `at` sets it.
        method: "ekf" or "ukf".
        residual: what lies between two observations, such as wrap_angles(1); None is their difference.
        input_size: u, of functions that are given inputs.
        alpha, beta, kappa: of the sigma points. Means are rounded by eps |x| / c², c² = alpha² (s + kappa).
        components, fill: as of a SwitchingModel; functions are of the whole state.

    >>> import torch
    >>> from gradlogz.filters import Prior, imm
    >>> model = NonlinearModel(
    ...     transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]),
    ...     move=(torch.sin, torch.cos),
    ...     Q=0.1 * torch.ones(2, 1, 1),
    ...     observe=lambda x: x**3,
    ...     R=0.1 * torch.ones(2, 1, 1),
    ... )
    >>> found = imm(model, torch.tensor([[1.0], [0.2]]), Prior(torch.zeros(1), torch.eye(1)))
    >>> found.log_mode_probability.argmax(-1)
    tensor([1, 1])
    """

    transition: Float[Tensor, "*#t k k"] | Generator
    move: Function | Sequence[Function] = static_field()
    Q: Float[Tensor, "*#t k s s"]
    observe: Function | Sequence[Function] = static_field()
    R: Float[Tensor, "*#t k o o"]
    dt: Float[Tensor, "*#t"] | None = dataclasses.field(default=None, kw_only=True)
    method: Literal["ekf", "ukf"] = static_field(default="ekf", kw_only=True)
    residual: Residual | None = static_field(default=None, kw_only=True)
    input_size: int | None = static_field(default=None, kw_only=True)
    alpha: float = static_field(default=1.0, kw_only=True)
    beta: float = static_field(default=2.0, kw_only=True)
    kappa: float = static_field(default=0.0, kw_only=True)
    components: tuple[tuple[int, ...], ...] | None = static_field(default=None, kw_only=True)
    fill: Literal["modes", "zero"] = static_field(default="modes", kw_only=True)
    validate: bool = static_field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        call, fields = "NonlinearModel", self.fields()
        if self.continuous and self.dt is not None:
            remedy = "The lengths of steps follow from the times of observations."
            condition = "dt must come with a transition matrix"
            raise InputValueError(call, "dt", f"{condition}, got dt beside a Generator", remedy)
        check_floats(call, **fields | {"Q": self.Q, "R": self.R})
        check_fields(call, fields)
        names: tuple[Literal["move", "observe"], ...] = ("move", "observe")
        for name in names:
            object.__setattr__(self, name, functions := self.functions(name))
            if len(functions) != self.modes or not all(callable(f) for f in functions):
                fact = f"{len(functions)}, of which {sum(callable(f) for f in functions)} can be called"
                condition = f"{name} must be a function for each of k={self.modes} modes, or one for all"
                raise InputValueError(call, name, f"{condition}, got {fact}", "Pass a list in the order of the modes.")
        if self.method not in ("ekf", "ukf") or not self.alpha**2 * (self.state_size + self.kappa) > 0:
            condition = 'method must be "ekf" or "ukf", and alpha² (s + kappa) positive'
            fact = f"{self.method!r}, alpha={self.alpha}, kappa={self.kappa}"
            raise InputValueError(
                call, "method", f"{condition}, got {fact}", "kappa must be above -s, the size of the state."
            )
        check_components(call, self.components, self.fill, self.modes, self.state_size)
        if self.validate and self.method == "ukf":
            self._check_points(call)
        if self.validate:
            check_finite(call, **fields)
            check_transition(call, self.transition)
            check_positive_semidefinite(call, "Q", self.Q)
            check_positive_semidefinite(call, "R", self.R)
            self._check_functions(call)

    @classmethod
    @without_autocast
    def of(
        cls,
        models: Sequence[NonlinearMode | KalmanModel],
        *,
        transition: Float[Tensor, "*#t k k"] | Generator,
        observe: Function | None = None,
        R: Float[Tensor, "*#t o o"] | None = None,
        components: Sequence[Sequence[int]] | None = None,
        fill: Literal["modes", "zero"] = "modes",
        method: Literal["ekf", "ukf"] = "ekf",
        residual: Residual | None = None,
        input_size: int | None = None,
        alpha: float = 1.0,
        beta: float = 2.0,
        kappa: float = 0.0,
        validate: bool = True,
    ) -> "NonlinearModel":
        """Modes of one state, linear or not, assembled in this order; other arguments are fields of NonlinearModel.

        Args:
            transition: a transition matrix for modes of steps, a Generator for modes of continuous time.
            observe: of the whole state, in place of what each mode observes; with R.
            components: which components of the whole state each mode has, in its order; None if each has all.
        """
        call = "NonlinearModel.of"
        if len(models) == 0 or not all(isinstance(m, NonlinearMode | KalmanModel) for m in models):
            fact = f"{len(models)} of types {sorted({type(m).__name__ for m in models})}"
            condition = "models must be one NonlinearMode or KalmanModel or more"
            raise InputTypeError(call, "models", f"{condition}, got {fact}", "Pass a list such as [unknown_turn(...)].")
        if (observe is None) != (R is None):
            fact = "R alone" if observe is None else "observe alone"
            remedy = "R is the covariance of the noise in what is observed."
            raise InputValueError(call, "observe", f"observe and R must be given together, got {fact}", remedy)
        continuous = isinstance(transition, Generator)
        if {m.continuous for m in models} != {continuous}:
            fact = f"{sum(m.continuous for m in models)} of {len(models)} that are continuous"
            condition = f"models must be {'continuous with a Generator' if continuous else 'of steps with a matrix'}"
            remedy = "unknown_turn and its like are of steps with dt=, and continuous without it."
            raise InputValueError(call, "models", f"{condition}, got {fact}", remedy)
        modes = [_as_functions(call, m) if isinstance(m, KalmanModel) else m for m in models]
        if R is not None:
            modes = [m._replace(R=R) for m in modes]
        own = tuple(tuple(c) for c in components) if components is not None else None
        lifts = lifted(call, [(m.Q, m.R.shape[-1]) for m in modes], own)
        if own is not None and lifts is not None:
            modes = [_whole(m, E, list(c)) for m, E, c in zip(modes, lifts, own, strict=True)]
        Q, R = (stack_modes([getattr(m, name) for m in modes], 2) for name in ("Q", "R"))
        assert Q is not None
        assert R is not None
        seen = tuple(m.observe for m in modes) if observe is None else (observe,) * len(modes)
        return cls(
            transition=transition,
            move=tuple(m.move for m in modes),
            Q=Q,
            observe=seen,
            R=R,
            components=own,
            fill=fill,
            method=method,
            residual=residual,
            input_size=input_size,
            alpha=alpha,
            beta=beta,
            kappa=kappa,
            validate=validate,
        )

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
        return self.Q.shape[-1]

    @property
    def observation_size(self) -> int:
        """o."""
        return self.R.shape[-1]

    @property
    def has(self) -> Bool[Tensor, "k s"] | None:
        """Which components of the state each mode has; None if every mode has all."""
        return belonging(self.components, self.R.device)

    @property
    def steps(self) -> int | None:
        """t, the number of steps for which a model that changes in time is given; None where it does not change."""
        return steps_of(self.fields())

    @without_autocast
    def at(self, dt: Float[Tensor, "*#b t"]) -> "NonlinearModel":
        """The model of steps of given lengths, of a model of continuous time; inputs are held during a step."""
        if not isinstance(self.transition, Generator):
            condition, fact = "the model must be one of continuous time", "one with a transition matrix"
            remedy = "Build it with Generator(rate) in its place, and functions of a state and a time."
            raise InputValueError("NonlinearModel.at", "model", f"{condition}, got {fact}", remedy)
        transition = discretize_chain(self.transition.rate, dt)
        return dataclasses.replace(self, transition=transition, dt=dt, validate=False)

    def parameters(self, inputs: Float[Tensor, "*c t u"] | None = None) -> "NonlinearParameters":
        """What a filter needs of the model."""
        assert isinstance(self.transition, Tensor)  # filters ask of steps
        has, Q = self.has, self.Q
        if has is not None:
            Q = Q * (has.unsqueeze(-1) & has.unsqueeze(-2))
        u = None if inputs is None else inputs.unsqueeze(-2)
        fill = has if self.fill == "modes" else None
        return NonlinearParameters(self.transition, Q, self.R, u, self.dt, fill, has, self)

    def narrow(self, time: int) -> "NonlinearModel":
        """The model of one step, its time dimension kept with size 1."""
        if self.steps in (None, 1):
            return self
        return dataclasses.replace(self, **narrowed(self.fields(), time), validate=False)

    def fields(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name; `rate` is that of a Generator."""
        return tensors_of(self, ("Q", "R", "dt"))

    def functions(self, name: Literal["move", "observe"]) -> tuple[Function, ...]:
        """One for each mode."""
        given: Function | Sequence[Function] = getattr(self, name)
        return (given,) * self.modes if callable(given) else tuple(given)

    def _check_points(self, call: str) -> None:
        """What curvature adds is W = sum_i d_i d_i^T / c² + (beta - alpha²) e e^T with e = sum_i d_i / c².

        That is a covariance for all d_i = (f_i+ + f_i-) / 2 - f(m) if c² + n (beta - alpha²) is not negative.
        """
        n, kappa = self.state_size, self.kappa
        if self.alpha**2 * kappa + n * self.beta < 0:
            condition = 'alpha² kappa + s beta must be 0 or more for "ukf", so that what it adds is a covariance'
            fact = f"alpha={self.alpha}, beta={self.beta}, kappa={kappa} and s={n}"
            raise InputValueError(
                call, "alpha", f"{condition}, got {fact}", "beta=2 is that of Gaussians, kappa=0 needs no more."
            )
        least = 1e4 * torch.finfo(self.R.dtype).eps
        if self.alpha**2 * (n + kappa) < least:
            condition = f"alpha² (s + kappa) must be at least {least:.2g} in {self.R.dtype}, so that points differ"
            fact = f"{self.alpha**2 * (n + kappa):.2g}"
            raise InputValueError(
                call, "alpha", f"{condition}, got {fact}", "alpha=1 keeps all digits; or take float64."
            )

    def _check_functions(self, call: str) -> None:
        """Functions take a state and give what they should; they are tried at 0, for no time."""
        if not has_values(self.Q):
            return
        state, more = self.Q.new_zeros(self.state_size), []
        if self.input_size is not None:
            more.append(self.Q.new_zeros(self.input_size))
        flows = self.continuous or self.dt is not None
        sizes: dict[Literal["move", "observe"], int] = {"move": self.state_size, "observe": self.observation_size}
        for name, size in sizes.items():
            for f in self.functions(name):
                flow = flows and name == "move"
                found = f(state, self.Q.new_zeros(()), *more) if flow else f(state, *more)
                if found.shape != (size,):
                    condition = f"{name} must take a state [{self.state_size}] to [{size}]"
                    remedy = "Functions are written for one state; targets are mapped over."
                    raise InputValueError(call, name, f"{condition}, got shape {shape_of(found)}", remedy)
                if flow and bool((found.abs() > 1e-6).any()):
                    remedy = "move(x, dt) is where x is after dt; follow_drift makes it of a drift."
                    fact = "a state 0 that moved"
                    raise InputValueError(
                        call, "move", f"move must leave a state where it is for dt = 0, got {fact}", remedy
                    )


class NonlinearParameters(NamedTuple):
    """The fields of a model with its inputs, of all steps or of one."""

    transition: Float[Tensor, "*#t k k"]
    Q: Float[Tensor, "*#t k s s"]
    R: Float[Tensor, "*#t k o o"]
    u: Float[Tensor, "*#t 1 u"] | None
    dt: Float[Tensor, "*#t"] | None
    has: Bool[Tensor, "k s"] | None
    own: Bool[Tensor, "k s"] | None
    model: NonlinearModel

    def each(self, steps: int) -> "Iterator[NonlinearParameters]":
        """Those of every step, without time."""
        tensors = {name: getattr(self, name) for name in ("transition", "Q", "R", "u", "dt")}
        return (self._replace(**now) for now in each_step(tensors, steps))

    def by_history(self) -> "NonlinearParameters":
        """Those of one step for states [*b, h, k, s]: every history by every mode."""
        u = None if self.u is None else self.u.unsqueeze(-3)
        dt = None if self.dt is None else self.dt.unsqueeze(-1)
        return self._replace(Q=self.Q.unsqueeze(-4), R=self.R.unsqueeze(-4), u=u, dt=dt)

    # What a filter asks of one step, mode by mode --------------------------------------------------------------------

    def predict(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """The law of the state one step on, as a Gaussian."""
        return self._moved(self._through("move", mean, covariance, None), covariance, self._noise(mean))

    def update(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
        seen: Bool[Tensor, "*#b #k o"] | None,
    ) -> Updated:
        """The law of the state given an observation, as a Gaussian, and how likely that was."""
        through = self._through("observe", mean, covariance, self.model.residual)
        v = self.difference(observation, through.mean)
        if through.root is None:
            found = correct(mean, covariance, v, H=through.slope, R=self.R, seen=seen)
            return found._replace(failure=_named(found.failure, through))
        L, eye = through.root, torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        z = correct(torch.zeros_like(mean), eye, v, H=through.slope, R=self.R + through.curvature, seen=seen)
        m = mean + (L @ z.mean.unsqueeze(-1)).squeeze(-1)
        P = symmetric(L @ z.covariance @ L.mT)
        return z._replace(mean=m, covariance=P, failure=_named(z.failure, through))

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """The law of what will be observed; where angles are, those of all modes on one side of the circle."""
        through = self._through("observe", mean, covariance, self.model.residual)
        first = through.mean[..., :1, :]
        alike = first + self.difference(through.mean, first) if self.model.residual else through.mean
        return GaussianMoments(alike, symmetric(through.spread(covariance) + self.R))

    def difference(self, left: Float[Tensor, "*#b o"], right: Float[Tensor, "*#b o"]) -> Float[Tensor, "*#b o"]:
        """What lies between two observations."""
        return _between(self.model.residual, left, right)

    # What a smoother asks of one step --------------------------------------------------------------------------------

    def linearize_move(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> Motion:
        """The law of the state one step on, as a Gaussian, the matrix that has its covariance with the state, and Q."""
        through = self._through("move", mean, covariance, None)
        F, noise = through.matrix(), self._noise(mean)
        Q = noise + through.curvature
        if self.own is not None:
            F, Q = F * self.own.unsqueeze(-1), Q * (self.own.unsqueeze(-1) & self.own.unsqueeze(-2))
        return Motion(self._moved(through, covariance, noise), F, Q)

    def linearize_observe(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
    ) -> LinearizedObservation:
        """What an observation differs by from what was expected of it, and the line through the function there."""
        through = self._through("observe", mean, covariance, self.model.residual)
        v = self.difference(observation, through.mean)
        return LinearizedObservation(v, through.matrix(), self.R + through.curvature)

    def along(
        self, histories: Int[Tensor, "*b n t"], **fields: Tensor
    ) -> tuple[NonlinearModel, Float[Tensor, "*b n t u"]]:
        """The model of one mode that is what a history says at each step, and its inputs: the last is that mode.

        Args:
            fields: Q and R of the modes of each history.
        """
        u, which = self.u, histories.to(self.R.dtype).unsqueeze(-1)
        inputs = which
        if u is not None:
            inputs = torch.cat((u.squeeze(-2).unsqueeze(-3).expand(*which.shape[:-1], -1), which), -1)

        def chosen(functions: tuple[Function, ...], own: Tensor | None) -> Function:
            def through(x: Tensor, *given: Tensor) -> Tensor:
                *more, told = given
                if u is not None:
                    more.append(told[:-1])
                each = torch.stack([f(x, *more) for f in functions])
                each = each if own is None else each * own
                return each.take_along_dim(told[-1].long().expand(1, each.shape[-1]), 0).squeeze(0)

            return through

        changed: dict[str, Any] = {
            "transition": which.new_ones(1, 1),
            "move": chosen(self.model.functions("move"), self.own),
            "observe": chosen(self.model.functions("observe"), None),
            "dt": self.dt if self.dt is None or self.dt.ndim < 2 else self.dt.unsqueeze(-2),
            "input_size": inputs.shape[-1],
            "components": None,
            "validate": False,
        }
        return dataclasses.replace(self.model, **changed | fields), inputs

    def _moved(self, through: "Through", covariance: Tensor, noise: Tensor) -> GaussianMoments:
        """A Gaussian after a step; what a mode lacks stays 0."""
        m, P = through.mean, symmetric(through.spread(covariance) + noise)
        if self.own is None:
            return GaussianMoments(m, P)
        return GaussianMoments(m * self.own, P * (self.own.unsqueeze(-1) & self.own.unsqueeze(-2)))

    def _noise(self, mean: Tensor) -> Tensor:
        """Q, or what a density adds up to in a step along the flow."""
        if self.dt is None:
            return self.Q
        functions = self.model.functions("move")
        m = mean.expand(*mean.shape[:-2], len(functions), -1)
        nodes = torch.tensor(NODES, dtype=m.dtype, device="cpu").to(m.device, non_blocking=True)

        def rest(f: Function) -> Mapped:
            def at(x: Tensor, dt: Tensor, *u: Tensor) -> tuple[Tensor, ...]:
                def one(node: Tensor) -> Tensor:
                    left = torch.func.jacfwd(lambda x: f(x, (1 - node) * dt, *u))
                    return left(f(x, node * dt, *u))  # type: ignore[no-any-return]

                return (torch.func.vmap(one)(nodes),)

            return at

        (tangents,) = _each_mode(functions, rest, m, self._more("move", m))
        return diffuse(tangents.to(m.dtype), self.Q, self.dt.unsqueeze(-1))

    def _more(self, name: Literal["move", "observe"], m: Tensor) -> tuple[Tensor, ...]:
        """What functions are given beside states m [*b, k, s]."""
        lead = m.shape[:-1]
        dt = () if self.dt is None or name == "observe" else (self.dt.unsqueeze(-1).expand(lead),)
        return dt if self.u is None else (*dt, self.u.expand(*lead, -1))

    def _through(
        self, name: Literal["move", "observe"], mean: Tensor, covariance: Tensor, residual: Residual | None
    ) -> "Through":
        """A Gaussian through a function of each mode."""
        functions = self.model.functions(name)
        m = mean.expand(*mean.shape[:-2], len(functions), -1)
        if self.model.method == "ekf":
            return _tangent(functions, m, self._more(name, m))
        P = covariance.expand(*m.shape, -1)
        return _sigma_points(functions, m, P, self._more(name, m), residual, self.model)


def _named(failure: Tensor, through: "Through") -> Tensor:
    """Why there is no density: functions that have no value or no derivative come first."""
    lost = ~through.mean.isfinite().all(-1) | ~through.slope.isfinite().flatten(-2).all(-1)
    return torch.where(lost, NOT_FINITE, failure)


class Through(NamedTuple):
    """f(m + e) as if it were linear: mean + slope e, or mean + slope z + N(0, curvature) where e = root z."""

    mean: Float[Tensor, "*b k o"]
    slope: Float[Tensor, "*b k o s"]
    root: Float[Tensor, "*b k s s"] | None = None
    curvature: Float[Tensor, "*b k o o"] | float = 0.0

    def spread(self, covariance: Tensor) -> Tensor:
        """The covariance of f."""
        if self.root is None:
            return self.slope @ covariance @ self.slope.mT
        return self.slope @ self.slope.mT + self.curvature

    def matrix(self) -> Tensor:
        """A with cov(f, x) = A P, so that f(m + e) is mean + A e + N(0, curvature): A root = slope.

        Where a column of the root is 0 so is that of the slope, and of A.
        """
        if self.root is None:
            return self.slope
        dead = self.root.diagonal(dim1=-2, dim2=-1) == 0
        return torch.linalg.solve_triangular(
            self.root + torch.diag_embed(dead.to(self.root)), self.slope, upper=False, left=False
        )


def _tangent(functions: tuple[Function, ...], m: Tensor, more: tuple[Tensor, ...]) -> Through:
    """f and f' at the mean, in one forward pass."""

    def twice(f: Function) -> Mapped:
        return torch.func.jacfwd(lambda *x: (f(*x),) * 2, has_aux=True)  # type: ignore[no-any-return]

    slope, value = _each_mode(functions, twice, m, more)
    return Through(value, slope.to(m.dtype))  # torch's tangents of single numbers times floats are float64


def _sigma_points(
    functions: tuple[Function, ...],
    m: Tensor,
    P: Tensor,
    more: tuple[Tensor, ...],
    residual: Residual | None,
    model: NonlinearModel,
) -> Through:
    """f at m and at m ± c L_i."""
    n = m.shape[-1]
    square = model.alpha**2 * (n + model.kappa)
    L = root(P)
    away = square**0.5 * L.mT  # row i is c L_i
    points = torch.cat((m.unsqueeze(-2), m.unsqueeze(-2) + away, m.unsqueeze(-2) - away), -2)  # [*b, k, 2n + 1, s]

    def everywhere(f: Function) -> Mapped:
        return lambda x, *more: (torch.func.vmap(lambda point: f(point, *more))(x),)

    (f,) = _each_mode(functions, everywhere, points, more, inner=1)
    center = f[..., :1, :]
    if residual is not None:  # all points on the side of the circle on which the first one is
        f = torch.cat((center, center + _between(residual, f[..., 1:, :], center)), -2)
    plus, minus = f[..., 1 : n + 1, :], f[..., n + 1 :, :]
    mean = center + ((plus - center) + (minus - center)).sum(-2, keepdim=True) / (2 * square)
    even, first = (plus + minus) / 2 - mean, center - mean
    weight = 2 - n / square - model.alpha**2 + model.beta
    W = even.mT @ even / square + weight * (first.mT @ first)
    return Through(mean.squeeze(-2), ((plus - minus) / (2 * square**0.5)).mT, L, W)


def root(P: Float[Tensor, "*b s s"]) -> Float[Tensor, "*b s s"]:
    """Cholesky's L with L L^T = P, column by column; a covariance may be singular, and then has columns of 0."""
    rest, columns = P, []
    least = 8 * P.shape[-1] * torch.finfo(P.dtype).eps * P.diagonal(dim1=-2, dim2=-1)
    for i in range(P.shape[-1]):
        pivot = rest[..., i, i]
        alive = (pivot > least[..., i]) & (pivot > 0)
        length = torch.where(alive, pivot, 1.0).sqrt().unsqueeze(-1)
        column = torch.where(alive.unsqueeze(-1), rest[..., :, i] / length, 0.0)
        columns.append(column)
        rest = rest - column.unsqueeze(-1) * column.unsqueeze(-2)
    return torch.stack(columns, -1).tril()


def _each_mode(
    functions: tuple[Function, ...],
    change: Callable[[Function], Mapped],
    x: Tensor,
    more: tuple[Tensor, ...],
    inner: int = 0,
) -> list[Tensor]:
    """Function j of x [*b, k, ..., s] at mode j, mapped over the rest; one call for all modes that share a function."""
    # Maps of derivatives do not compile. The name is looked up when it is needed: it imports torch's compiler.
    each = torch.compiler.disable(_each_in_turn) if torch.compiler.is_compiling() else _each_in_turn
    found: list[Tensor] = each(functions, change, x, more, inner)
    return found


def _each_in_turn(
    functions: tuple[Function, ...],
    change: Callable[[Function], Mapped],
    x: Tensor,
    more: tuple[Tensor, ...],
    inner: int,
) -> list[Tensor]:
    def mapped(f: Function, *arguments: Tensor) -> tuple[Tensor, ...]:
        before = arguments[0].shape[: arguments[0].ndim - 1 - inner]
        flat = [a.reshape(-1, *a.shape[len(before) :]).contiguous() for a in arguments]  # modes may share memory
        return tuple(r.reshape(*before, *r.shape[1:]) for r in torch.func.vmap(change(f))(*flat))

    if all(f is functions[0] for f in functions):
        return list(mapped(functions[0], x, *more))
    at = x.ndim - 2 - inner
    found = [mapped(f, *(a.select(at, j) for a in (x, *more))) for j, f in enumerate(functions)]
    return [torch.stack(parts, at) for parts in zip(*found, strict=True)]


def _between(residual: Residual | None, left: Tensor, right: Tensor) -> Tensor:
    """left - right, or what stands for it."""
    if residual is None:
        return left - right
    left, right = torch.broadcast_tensors(left, right)
    flat = torch.func.vmap(residual)(left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1]))
    return flat.reshape(left.shape)


def _as_functions(call: str, model: KalmanModel) -> NonlinearMode:
    """A linear system as two functions."""
    if any(t is not None and t.ndim > 2 for t in (model.F, model.H, model.B, model.D)):
        condition, fact = "linear models must not change from one step to the next", "one that changes in time"
        raise InputValueError(call, "models", f"{condition}, got {fact}", "Write a function of state and input.")

    ends = model.continuous and _ends(model.F)

    def driven(offset: Tensor | None, matrix: Tensor | None, u: tuple[Tensor, ...]) -> Tensor | None:
        parts = [t for t in (offset, None if matrix is None else matrix @ u[0]) if t is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def move(x: Tensor, *u: Tensor) -> Tensor:
        y, more = model.F @ x, driven(model.b, model.B, u)
        return y if more is None else y + more

    def flow(x: Tensor, dt: Tensor, *u: Tensor) -> Tensor:
        more = driven(model.b, model.B, u)
        if more is None:
            return exponential(model.F, dt, ends=ends) @ x
        held = torch.nn.functional.pad(torch.cat((model.F, more.unsqueeze(-1)), -1), (0, 0, 0, 1))
        return (exponential(held, dt, ends=ends) @ torch.nn.functional.pad(x, (0, 1), value=1.0))[:-1]

    def observe(x: Tensor, *u: Tensor) -> Tensor:
        y, more = model.H @ x, driven(model.d, model.D, u)
        return y if more is None else y + more

    return NonlinearMode(flow if model.continuous else move, model.Q, observe, model.R, model.continuous)


def _ends(A: Tensor) -> bool:
    """Whether the series of exp(A dt) ends, as of positions and velocities; that of a derivative in A does not."""
    constant = not A.requires_grad and torch.autograd.forward_ad.unpack_dual(A).tangent is None
    return has_values(A) and constant and not bool(torch.linalg.matrix_power(A, A.shape[-1]).any())


def _whole(mode: NonlinearMode, E: Tensor, own: list[int]) -> NonlinearMode:
    """A mode of some components as one of the whole state, which moves nothing else."""
    places = torch.tensor(own, device=E.device)  # once: a list would be sent to the device in every step
    return NonlinearMode(
        lambda x, *u: E @ mode.move(x[places], *u),
        E @ mode.Q @ E.mT,
        lambda x, *u: mode.observe(x[places], *u),
        mode.R,
        mode.continuous,
    )
