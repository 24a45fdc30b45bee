"""Switching systems with nonlinear modes: the extended and the unscented Kalman filter.

    p(x_t | x_{t-1}, s_t = j) = N(f_j(x_{t-1}), Q_j),        p(y_t | x_t, s_t = j) = N(h_j(x_t), R_j)

A function f of a Gaussian N(m, P), P = L L^T, is linearised: f(m + L z) ≈ m' + G z + N(0, W).

    "ekf"   Jacobian           m' = f(m),   G = f'(m) L,   W = 0                        f' by forward differentiation
    "ukf"   sigma points       m ± c L_i,   c² = alpha² (n + kappa)                                  [julier04; wan00]
            m'  = f(m) + sum_i (f_i+ + f_i- - 2 f(m)) / 2 c²,           f_i± = f(m ± c L_i)
            G_i = (f_i+ - f_i-) / 2 c                                                       differences of first order
            W   = sum_i e_i e_i^T / c² + (2 - n / c² - alpha² + beta) e_0 e_0^T             from curvature
            e_i = (f_i+ + f_i-) / 2 - m',   e_0 = f(m) - m'

These are the usual weighted sums over 2 n + 1 points, separated into odd and even parts. Linear functions have W = 0
and give the Kalman filter, and a covariance is a sum of squares. The rest is the Kalman filter in the coordinates z. L
is the Cholesky factor, also of singular covariances. With alpha = 1, kappa = 0, beta = 2 all weights are nonnegative.

In continuous time a function takes the duration too, f_j(x, dt), and the noise has a spectral density C. A step adds
the covariance ∫ Phi C Phi^T, Phi the Jacobian of the flow over the rest of the step (discretization.py).

Smoothers also need cov(x, f) = P A^T: A = f'(m), or A L = G [sarkka08]. Any such A serves where P is singular.

Read next: nonlinear_motion.py (turns of unknown rate, ranges and bearings), ../gaussian/switching.py (the filters),
../gaussian/backward_messages.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import (
    InputTypeError,
    InputValueError,
    check_finite,
    check_floats,
    has_values,
    shape_of,
)
from ..._pytree import record, replaced, static_field
from ..._typing import Bool, Float, Int, Tensor
from ...kernels.filters.forms import LINEAR, NODES, OWN, FunctionForm
from ..kalman import LinearizedObservation, Motion, Updated, correct
from ..moment_matching import GaussianMoments, symmetric
from ..records import TensorRecord
from ..scalars import from_array
from .discretization import diffuse, discretize_chain_steps, exponential
from .function_forms import PackedFunctions, packed_functions, with_form
from .own_functions import for_torch, is_compiled
from .switching_model import (
    Generator,
    KalmanModel,
    as_modes,
    check_components,
    check_covariances,
    check_fields,
    check_transition,
    component_mask,
    convert_fields,
    each_step,
    embeddings,
    lead_by_target,
    narrowed,
    stack_modes,
    steps_of,
    tensors_of,
)

Function = Callable[..., Tensor]  # f(state [s]) or f(state, input [u]); in continuous time f(state, dt, ...)
Mapped = Callable[..., tuple[Tensor, ...]]
NOT_FINITE = 1 << 20  # error code of a function without finite value or derivative, above those of cholesky_ex
Residual = Callable[[Tensor, Tensor], Tensor]  # difference of two observations [o]


class NonlinearMode(NamedTuple):
    """One mode: x' = move(x) + N(0, Q), y = observe(x) + N(0, R). Functions are those of a NonlinearModel.

    If `continuous`, move(x, dt) is the noise-free state after a time dt, and Q is the spectral density of the noise.
    """

    move: Function
    Q: Float[Tensor, "*#t s s"]
    observe: Function
    R: Float[Tensor, "*#t o o"]
    continuous: bool = False


@record
class NonlinearModel(TensorRecord):
    """Switching system with k nonlinear modes of one state.

        P(s_t = j | s_{t-1} = i)    = transition_ij
        p(x_t | x_{t-1}, s_t = j)   = N(move_j(x_{t-1}, u_t), Q_j)
        p(y_t | x_t, s_t = j)       = N(observe_j(x_t, u_t), R_j)

    Filters and smoothers accept it in place of a SwitchingModel. Fields may vary with time, as there. If input_size is
    given, functions take the input as last argument; time can be passed to them as an input.

    With a `Generator` in place of the transition matrix time is continuous: move(x, dt) is the noise-free state after a
    time dt, Q is the spectral density of the noise, and the series has `times`. Noise is propagated by the Jacobian of
    the flow; follow_drift makes a flow from a drift.

    Functions use torch. With method="ukf" and a transition matrix they may also be functions of arrays that numba
    compiles (`@njit`); filters of these are compiled, but have no gradients.

    Attributes:
        transition: transition matrix [k, k], or a Generator for continuous time.
        move: function of one state [s], shared by all modes or one for each; mapped over targets by torch.func.vmap.
        Q: covariance of the process noise [k, s, s], or its spectral density.
        observe: function from a state [s] to an observation [o], shared or one for each mode.
        R: covariance of the observation noise [k, o, o].
        dt: duration of each step, if `move` takes one; set by `at`.
        method: "ekf" or "ukf".
        residual: difference of two observations, such as wrap_angles(1); None subtracts.
        input_size: size u of the inputs; None if functions take none.
        alpha, beta, kappa: parameters of the sigma points. Means have rounding errors of eps |x| / c²,
            c² = alpha² (s + kappa).
        components, fill, per: as in SwitchingModel; functions take the full state.
        validate: whether values are checked.

    >>> import torch
    >>> from gradlogz.filters import Prior, imm
    >>> model = NonlinearModel(
    ...     transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]),
    ...     move=(torch.sin, torch.cos),
    ...     Q=0.1 * torch.ones(2, 1, 1),
    ...     observe=lambda x: x**3,
    ...     R=0.1 * torch.ones(2, 1, 1),
    ... )
    >>> filtered = imm(model, torch.tensor([[1.0], [0.2]]), Prior(torch.zeros(1), torch.eye(1)))
    >>> filtered.log_mode_probability.argmax(-1)
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
    per: Literal["time", "target"] | None = static_field(default=None, kw_only=True)
    validate: bool = static_field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        convert_fields(self, ("transition", "Q", "R", "dt"))
        lead_by_target("NonlinearModel", self)
        call, fields = "NonlinearModel", self.fields()
        if self.continuous and self.dt is not None:
            problem = "dt needs a transition matrix, but this model has a Generator"
            raise InputValueError(call, "dt", problem, "Drop dt; it follows from the times of the observations.")
        check_floats(call, **fields | {"Q": self.Q, "R": self.R})
        check_fields(call, fields)
        names: tuple[Literal["move", "observe"], ...] = ("move", "observe")
        for name in names:
            functions = tuple(for_torch(f, self.state_size) for f in self.functions(name))
            object.__setattr__(self, name, functions)
            if len(functions) != self.modes or not all(callable(f) for f in functions):
                fact = f"{len(functions)}, of which {sum(callable(f) for f in functions)} are callable"
                condition = f"{name} must be one function, or one for each of k={self.modes} modes"
                raise InputValueError(call, name, f"{condition}, got {fact}", "Pass a list in the order of the modes.")
        if self.method not in ("ekf", "ukf") or not self.alpha**2 * (self.state_size + self.kappa) > 0:
            condition = 'method must be "ekf" or "ukf", and alpha² (s + kappa) positive'
            fact = f"method={self.method!r}, alpha={self.alpha}, kappa={self.kappa}"
            raise InputValueError(
                call, "method", f"{condition}, got {fact}", "Use kappa above -s, minus the state size."
            )
        self._check_own_functions(call)
        check_components(call, self.components, self.fill, self.modes, self.state_size)
        if self.validate and self.method == "ukf":
            self._check_points(call)
        if self.validate:
            check_finite(call, **fields)
            check_transition(call, self.transition)
            check_covariances(call, self)
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
        """Assemble a model from linear and nonlinear modes; further arguments are fields of NonlinearModel.

        Args:
            models: the modes, in this order.
            transition: transition matrix for discrete-time modes, Generator for continuous-time modes.
            observe: function of the full state that replaces those of the modes; requires R.
            components: indices of the full state that each mode has, in its order; None if each has all.
        """
        call = "NonlinearModel.of"
        if len(models) == 0 or not all(isinstance(m, NonlinearMode | KalmanModel) for m in models):
            fact = f"{len(models)} of types {sorted({type(m).__name__ for m in models})}"
            condition = "models must be a list of NonlinearMode or KalmanModel"
            raise InputTypeError(call, "models", f"{condition}, got {fact}", "Pass a list such as [unknown_turn(...)].")
        if (observe is None) != (R is None):
            fact = "only R" if observe is None else "only observe"
            remedy = "Pass the covariance R of the observation noise with observe."
            raise InputValueError(call, "observe", f"observe and R must be given together, got {fact}", remedy)
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
        modes = [_as_functions(call, m) if isinstance(m, KalmanModel) else m for m in models]
        if R is not None:
            modes = [m._replace(R=from_array(R)) for m in modes]
        modes = [m._replace(**{n: for_torch(getattr(m, n), m.Q.shape[-1]) for n in ("move", "observe")}) for m in modes]
        index_sets = tuple(tuple(c) for c in components) if components is not None else None
        lifts = embeddings(call, [(m.Q, m.R.shape[-1]) for m in modes], index_sets)
        if index_sets is not None and lifts is not None:
            modes = [_embed(m, E, list(c)) for m, E, c in zip(modes, lifts, index_sets, strict=True)]
        Q, R = (stack_modes([getattr(m, name) for m in modes], 2) for name in ("Q", "R"))
        assert Q is not None
        assert R is not None
        observers = tuple(m.observe for m in modes) if observe is None else (observe,) * len(modes)
        return cls(
            transition=transition,
            move=tuple(m.move for m in modes),
            Q=Q,
            observe=observers,
            R=R,
            components=index_sets,
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
        """True if time is continuous."""
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
        """Mask [k, s] of the components that each mode has; None if every mode has all."""
        return component_mask(self.components, self.R.device)

    @property
    def steps(self) -> int | None:
        """Number of steps t of a time-varying model; None if the model is constant."""
        return steps_of(self.fields())

    @without_autocast
    def at(self, dt: Float[Tensor, "*#b t"]) -> "NonlinearModel":
        """Discretise a continuous-time model for steps of length dt; inputs are held during a step."""
        if not isinstance(self.transition, Generator):
            problem = "the model must be continuous in time, but it has a transition matrix"
            remedy = "Build it with Generator(rate) and functions move(x, dt)."
            raise InputValueError("NonlinearModel.at", "model", problem, remedy)
        transition = discretize_chain_steps(self.transition.rate, dt)
        is_compiled = self.Q.device.type == "cpu" and has_values(self.Q, dt)
        packed = {"packed": self.packed} if is_compiled else {}  # once for all steps
        return replaced(self, transition=transition, dt=dt, per="time", validate=False, **packed)

    def parameters(self, inputs: Float[Tensor, "*c t u"] | None = None) -> "NonlinearParameters":
        """Tensors that the steps of a filter need."""
        assert isinstance(self.transition, Tensor)  # filters discretise first
        has, Q = self.has, self.Q
        if has is not None:
            Q = Q * (has.unsqueeze(-1) & has.unsqueeze(-2))
        u = None if inputs is None else inputs.unsqueeze(-2)
        fill = has if self.fill == "modes" else None
        return NonlinearParameters(self.transition, Q, self.R, u, self.dt, fill, has, self)

    def narrow(self, time: int) -> "NonlinearModel":
        """Model of one step, with a time dimension of size 1."""
        if self.steps in (None, 1):
            return self
        return dataclasses.replace(self, **narrowed(self.fields(), time), validate=False)

    def fields(self) -> dict[str, Tensor]:
        """Tensor fields by name; `rate` is that of a Generator."""
        return tensors_of(self, ("Q", "R", "dt"))

    def functions(self, name: Literal["move", "observe"]) -> tuple[Function, ...]:
        """Functions of the given kind, one for each mode."""
        functions: Function | Sequence[Function] = getattr(self, name)
        return (functions,) * self.modes if callable(functions) else tuple(functions)

    @functools.cached_property
    def packed(self) -> PackedFunctions | None:
        """Functions as compiled filters take them; None if one of them is not built in."""
        if self.input_size is not None:
            return None
        functions = self.functions("move"), self.functions("observe")
        return packed_functions(*functions, self.residual, self.Q, self.observation_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}  # addresses of this process

    def _check_own_functions(self, call: str) -> None:
        """Check that functions compiled by numba are used where they need no derivatives."""
        names: tuple[Literal["move", "observe"], ...] = ("move", "observe")
        if is_compiled(self.residual):
            problem = "residual must be a function of tensors, got one that numba compiled"
            raise InputTypeError(call, "residual", problem, "Write it in torch, or use wrap_angles.")
        for name in names:
            if not any(_is_own(f) for f in self.functions(name)):
                continue
            if self.method == "ekf":
                problem = f'method="ekf" differentiates functions, but {name} is compiled by numba'
                raise InputValueError(call, "method", problem, f'Pass method="ukf", or write {name} in torch.')
            if name == "move" and (self.continuous or self.dt is not None):
                problem = "a move that numba compiled has no derivatives, which the noise of continuous time needs"
                raise InputValueError(call, "move", problem, "Write it in torch, or pass a transition matrix.")

    def _check_points(self, call: str) -> None:
        """Check that W = sum_i d_i d_i^T / c² + (beta - alpha²) e e^T, e = sum_i d_i / c², is always a covariance.

        It is one for all d_i = (f_i+ + f_i-) / 2 - f(m) if c² + n (beta - alpha²) >= 0.
        """
        n, kappa = self.state_size, self.kappa
        if self.alpha**2 * kappa + n * self.beta < 0:
            condition = 'alpha² kappa + s beta must be nonnegative for "ukf", so that covariances stay valid'
            fact = f"alpha={self.alpha}, beta={self.beta}, kappa={kappa} and s={n}"
            raise InputValueError(call, "alpha", f"{condition}, got {fact}", "Use beta=2 and kappa=0.")
        least = 1e4 * torch.finfo(self.R.dtype).eps
        if self.alpha**2 * (n + kappa) < least:
            condition = f"alpha² (s + kappa) must be at least {least:.2g} in {self.R.dtype} to separate sigma points"
            fact = f"{self.alpha**2 * (n + kappa):.2g}"
            raise InputValueError(call, "alpha", f"{condition}, got {fact}", "Use alpha=1, or float64.")

    def _check_functions(self, call: str) -> None:
        """Check the output shape of every function at state 0 and, for flows, that dt = 0 changes nothing."""
        if not has_values(self.Q):
            return
        state, extra = self.Q.new_zeros(self.state_size), []
        if self.input_size is not None:
            extra.append(self.Q.new_zeros(self.input_size))
        flows = self.continuous or self.dt is not None
        sizes: dict[Literal["move", "observe"], int] = {"move": self.state_size, "observe": self.observation_size}
        for name, size in sizes.items():
            for f in self.functions(name):
                flow = flows and name == "move"
                output = f(state, self.Q.new_zeros(()), *extra) if flow else f(state, *extra)
                if output.shape != (size,):
                    condition = f"{name} must map a state [{self.state_size}] to [{size}]"
                    remedy = "Write the function for one state, without target dimensions."
                    raise InputValueError(call, name, f"{condition}, got shape {shape_of(output)}", remedy)
                if flow and bool((output.abs() > 1e-6).any()):
                    problem = "move must leave a state unchanged for dt = 0, but it changes the state 0"
                    remedy = "Return the state after time dt; follow_drift makes such a function from a drift."
                    raise InputValueError(call, "move", problem, remedy)


class NonlinearParameters(NamedTuple):
    """Fields of a model with its inputs, for all steps or one.

    `active` is the mask of the components of each mode; `has` is the same mask if `fill` is "modes", else None.
    """

    transition: Float[Tensor, "*#t k k"]
    Q: Float[Tensor, "*#t k s s"]
    R: Float[Tensor, "*#t k o o"]
    u: Float[Tensor, "*#t 1 u"] | None
    dt: Float[Tensor, "*#t"] | None
    has: Bool[Tensor, "k s"] | None
    active: Bool[Tensor, "k s"] | None
    model: NonlinearModel

    def each(self, steps: int) -> "Iterator[NonlinearParameters]":
        """Yield the parameters of every step, without time."""
        tensors = {name: getattr(self, name) for name in ("transition", "Q", "R", "u", "dt")}
        return (self._replace(**now) for now in each_step(tensors, steps))

    def by_history(self) -> "NonlinearParameters":
        """Parameters of one step for states [*b, h, k, s]: every history by every mode."""
        u = None if self.u is None else self.u.unsqueeze(-3)
        dt = None if self.dt is None else self.dt.unsqueeze(-1)
        return self._replace(Q=self.Q.unsqueeze(-4), R=self.R.unsqueeze(-4), u=u, dt=dt)

    # Operations of a filter, mode by mode ----------------------------------------------------------------------------

    def predict(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """Predicted moments of the next state."""
        return self._moved(self._linearize("move", mean, covariance, None), covariance, self._noise(mean))

    def update(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
        observed: Bool[Tensor, "*#b #k o"] | None,
    ) -> Updated:
        """Condition the state on an observation; also returns its log likelihood."""
        through = self._linearize("observe", mean, covariance, self.model.residual)
        v = self.difference(observation, through.mean)
        if through.root is None:
            updated = correct(mean, covariance, v, H=through.slope, R=self.R, observed=observed)
            return updated._replace(failure=_failure_code(updated.failure, through))
        L, eye = through.root, torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        z = correct(torch.zeros_like(mean), eye, v, H=through.slope, R=self.R + through.curvature, observed=observed)
        m = mean + (L @ z.mean.unsqueeze(-1)).squeeze(-1)
        P = symmetric(L @ z.covariance @ L.mT)
        return z._replace(mean=m, covariance=P, failure=_failure_code(z.failure, through))

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """Predicted moments of the observation; angles of all modes are unwrapped relative to the first mode."""
        through = self._linearize("observe", mean, covariance, self.model.residual)
        first = through.mean[..., :1, :]
        alike = first + self.difference(through.mean, first) if self.model.residual else through.mean
        return GaussianMoments(alike, symmetric(through.spread(covariance) + self.R))

    def difference(self, left: Float[Tensor, "*#b o"], right: Float[Tensor, "*#b o"]) -> Float[Tensor, "*#b o"]:
        """Difference of two observations, by `residual`."""
        return _difference(self.model.residual, left, right)

    # Operations of a smoother ----------------------------------------------------------------------------------------

    def linearize_move(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> Motion:
        """Predicted moments of the next state, the matrix F with cov(x', x) = F P, and Q."""
        through = self._linearize("move", mean, covariance, None)
        F, noise = through.matrix(), self._noise(mean)
        Q = noise + through.curvature
        if self.active is not None:
            F, Q = F * self.active.unsqueeze(-1), Q * (self.active.unsqueeze(-1) & self.active.unsqueeze(-2))
        return Motion(self._moved(through, covariance, noise), F, Q)

    def linearize_observe(
        self,
        mean: Float[Tensor, "*#b k s"],
        covariance: Float[Tensor, "*#b k s s"],
        observation: Float[Tensor, "*#b #k o"],
    ) -> LinearizedObservation:
        """Innovation, and the linearised observation at the predicted state."""
        through = self._linearize("observe", mean, covariance, self.model.residual)
        v = self.difference(observation, through.mean)
        return LinearizedObservation(v, through.matrix(), self.R + through.curvature)

    def along(
        self, histories: Int[Tensor, "*b n t"], **fields: Tensor
    ) -> tuple[NonlinearModel, Float[Tensor, "*b n t u"]]:
        """Time-varying model with one mode that follows a mode history, and its inputs, the last of which is the mode.

        Args:
            histories: mode at each step.
            fields: Q and R of the modes of each history.
        """
        u, which = self.u, histories.to(self.R.dtype).unsqueeze(-1)
        inputs = which
        if u is not None:
            inputs = torch.cat((u.squeeze(-2).unsqueeze(-3).expand(*which.shape[:-1], -1), which), -1)

        def chosen(functions: tuple[Function, ...], active: Tensor | None) -> Function:
            def through(x: Tensor, *arguments: Tensor) -> Tensor:
                *extra, mode_input = arguments
                if u is not None:
                    extra.append(mode_input[:-1])
                each = torch.stack([f(x, *extra) for f in functions])
                each = each if active is None else each * active
                return each.take_along_dim(mode_input[-1].long().expand(1, each.shape[-1]), 0).squeeze(0)

            return through

        changed: dict[str, Any] = {
            "transition": which.new_ones(1, 1),
            "move": chosen(self.model.functions("move"), self.active),
            "observe": chosen(self.model.functions("observe"), None),
            "dt": self.dt if self.dt is None or self.dt.ndim < 2 else self.dt.unsqueeze(-2),
            "input_size": inputs.shape[-1],
            "components": None,
            "per": "time",
            "validate": False,
        }
        return dataclasses.replace(self.model, **changed | fields), inputs

    def _moved(self, through: "Linearization", covariance: Tensor, noise: Tensor) -> GaussianMoments:
        """Predicted moments; components that a mode lacks stay 0."""
        m, P = through.mean, symmetric(through.spread(covariance) + noise)
        if self.active is None:
            return GaussianMoments(m, P)
        return GaussianMoments(m * self.active, P * (self.active.unsqueeze(-1) & self.active.unsqueeze(-2)))

    def _noise(self, mean: Tensor) -> Tensor:
        """Process noise of a step: Q, or the integral of the spectral density along the flow."""
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
        """Arguments of the functions after the states m [*b, k, s]: dt and inputs."""
        lead = m.shape[:-1]
        dt = () if self.dt is None or name == "observe" else (self.dt.unsqueeze(-1).expand(lead),)
        return dt if self.u is None else (*dt, self.u.expand(*lead, -1))

    def _linearize(
        self, name: Literal["move", "observe"], mean: Tensor, covariance: Tensor, residual: Residual | None
    ) -> "Linearization":
        """Linearise the function of each mode at a Gaussian."""
        functions = self.model.functions(name)
        m = mean.expand(*mean.shape[:-2], len(functions), -1)
        if self.model.method == "ekf":
            return _tangent(functions, m, self._more(name, m))
        P = covariance.expand(*m.shape, -1)
        return _sigma_points(functions, m, P, self._more(name, m), residual, self.model)


def _failure_code(failure: Tensor, through: "Linearization") -> Tensor:
    """Error code of a missing density; functions that are not finite take precedence."""
    lost = ~through.mean.isfinite().all(-1) | ~through.slope.isfinite().flatten(-2).all(-1)
    return torch.where(lost, NOT_FINITE, failure)


class Linearization(NamedTuple):
    """Linearisation of f(m + e): mean + slope e, or mean + slope z + N(0, curvature) where e = root z."""

    mean: Float[Tensor, "*b k o"]
    slope: Float[Tensor, "*b k o s"]
    root: Float[Tensor, "*b k s s"] | None = None
    curvature: Float[Tensor, "*b k o o"] | float = 0.0

    def spread(self, covariance: Tensor) -> Tensor:
        """Covariance of f."""
        if self.root is None:
            return self.slope @ covariance @ self.slope.mT
        return self.slope @ self.slope.mT + self.curvature

    def matrix(self) -> Tensor:
        """Matrix A with cov(f, x) = A P and f(m + e) ≈ mean + A e + N(0, curvature); A root = slope.

        Zero columns of the root give zero columns of the slope and of A.
        """
        if self.root is None:
            return self.slope
        dead = self.root.diagonal(dim1=-2, dim2=-1) == 0
        return torch.linalg.solve_triangular(
            self.root + torch.diag_embed(dead.to(self.root)), self.slope, upper=False, left=False
        )


def _tangent(functions: tuple[Function, ...], m: Tensor, extra: tuple[Tensor, ...]) -> Linearization:
    """Value and Jacobian of f at the mean, in one forward pass."""

    def twice(f: Function) -> Mapped:
        return torch.func.jacfwd(lambda *x: (f(*x),) * 2, has_aux=True)  # type: ignore[no-any-return]

    slope, value = _each_mode(functions, twice, m, extra)
    return Linearization(value, slope.to(m.dtype))  # torch may return float64 tangents for scalar inputs


def _sigma_points(
    functions: tuple[Function, ...],
    m: Tensor,
    P: Tensor,
    extra: tuple[Tensor, ...],
    residual: Residual | None,
    model: NonlinearModel,
) -> Linearization:
    """Linearise f from its values at m and m ± c L_i."""
    n = m.shape[-1]
    square = model.alpha**2 * (n + model.kappa)
    L = root(P)
    away = square**0.5 * L.mT  # row i is c L_i
    points = torch.cat((m.unsqueeze(-2), m.unsqueeze(-2) + away, m.unsqueeze(-2) - away), -2)  # [*b, k, 2n + 1, s]
    each = points.movedim(-2, 0)
    more = tuple(t.expand(2 * n + 1, *t.shape) for t in extra)
    f = _each_mode(functions, lambda f: lambda *x: (f(*x),), each, more)[0].movedim(0, -2)
    center = f[..., :1, :]
    if residual is not None:  # unwrap angles relative to the centre
        f = torch.cat((center, center + _difference(residual, f[..., 1:, :], center)), -2)
    plus, minus = f[..., 1 : n + 1, :], f[..., n + 1 :, :]
    mean = center + ((plus - center) + (minus - center)).sum(-2, keepdim=True) / (2 * square)
    even, first = (plus + minus) / 2 - mean, center - mean
    weight = 2 - n / square - model.alpha**2 + model.beta
    W = even.mT @ even / square + weight * (first.mT @ first)
    return Linearization(mean.squeeze(-2), ((plus - minus) / (2 * square**0.5)).mT, L, W)


def root(P: Float[Tensor, "*b s s"]) -> Float[Tensor, "*b s s"]:
    """Cholesky factor L, L L^T = P; a singular covariance gives columns of 0."""
    least = 8 * P.shape[-1] * torch.finfo(P.dtype).eps * P.diagonal(dim1=-2, dim2=-1)
    is_constant = not P.requires_grad and torch.autograd.forward_ad.unpack_dual(P).tangent is None
    if is_constant and P.device.type == "cpu" and has_values(P):  # elsewhere the question would synchronise
        L, failure = torch.linalg.cholesky_ex(P)
        if not bool(failure.any()) and bool((L.diagonal(dim1=-2, dim2=-1) ** 2 > least).all()):
            return L
    rest, columns = P, []
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
    extra: tuple[Tensor, ...],
) -> list[Tensor]:
    """Apply function j to x [*b, k, s] at mode j, mapped over targets, in one call if modes share a function."""
    # vmap of derivatives does not compile. torch.compiler is accessed lazily, because it imports the compiler.
    each = torch.compiler.disable(_each_in_turn) if torch.compiler.is_compiling() else _each_in_turn
    results: list[Tensor] = each(functions, change, x, extra)
    return results


def _each_in_turn(
    functions: tuple[Function, ...],
    change: Callable[[Function], Mapped],
    x: Tensor,
    extra: tuple[Tensor, ...],
) -> list[Tensor]:
    def mapped(f: Function, *arguments: Tensor) -> tuple[Tensor, ...]:
        before = arguments[0].shape[:-1]
        n = before.numel()
        flat = [a.reshape(n, *a.shape[len(before) :]).contiguous() for a in arguments]  # modes may share memory
        flat = flat if n else [a.new_zeros(1, *a.shape[1:]) for a in flat]  # vmap cannot map over no targets
        return tuple(r[:n].reshape(*before, *r.shape[1:]) for r in torch.func.vmap(change(f))(*flat))

    if all(f is functions[0] for f in functions):
        return list(mapped(functions[0], x, *extra))
    at = x.ndim - 2
    results = [mapped(f, *(a.select(at, j) for a in (x, *extra))) for j, f in enumerate(functions)]
    return [torch.stack(parts, at) for parts in zip(*results, strict=True)]


def _difference(residual: Residual | None, left: Tensor, right: Tensor) -> Tensor:
    """left - right, or `residual` of them."""
    if residual is None or 0 in (left.numel(), right.numel()):  # no targets, as above
        return left - right
    left, right = torch.broadcast_tensors(left, right)
    flat = torch.func.vmap(residual)(left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1]))
    return flat.reshape(left.shape)


def _is_own(function: Function) -> bool:
    """Return True if numba compiled the function, perhaps of some components."""
    form = getattr(function, "form", None)
    return isinstance(form, FunctionForm) and form.code == OWN


def _as_functions(call: str, model: KalmanModel) -> NonlinearMode:
    """Convert a linear mode to functions."""
    copied = {name: t.clone() for name in ("F", "H", "b", "d") if (t := getattr(model, name)) is not None}
    model = model._replace(**copied)  # torch and compiled filters see the same values
    if any(t is not None and t.ndim > 2 for t in (model.F, model.H, model.B, model.D)):
        problem = "a linear model with time-varying matrices cannot be a mode of a NonlinearModel"
        raise InputValueError(call, "models", problem, "Write it as a function of state and input.")

    nilpotent = model.continuous and _is_nilpotent(model.F)

    def driven(offset: Tensor | None, matrix: Tensor | None, u: tuple[Tensor, ...]) -> Tensor | None:
        parts = [t for t in (offset, None if matrix is None else matrix @ u[0]) if t is not None]
        return sum(parts[1:], parts[0]) if parts else None

    def move(x: Tensor, *u: Tensor) -> Tensor:
        y, extra = model.F @ x, driven(model.b, model.B, u)
        return y if extra is None else y + extra

    def flow(x: Tensor, dt: Tensor, *u: Tensor) -> Tensor:
        extra = driven(model.b, model.B, u)
        if extra is None:
            return exponential(model.F, dt, nilpotent=nilpotent) @ x
        held = torch.nn.functional.pad(torch.cat((model.F, extra.unsqueeze(-1)), -1), (0, 0, 0, 1))
        return (exponential(held, dt, nilpotent=nilpotent) @ torch.nn.functional.pad(x, (0, 1), value=1.0))[:-1]

    def observe(x: Tensor, *u: Tensor) -> Tensor:
        y, extra = model.H @ x, driven(model.d, model.D, u)
        return y if extra is None else y + extra

    if model.B is None and (model.b is None or (model.b.ndim == 1 and not model.continuous)):
        form = FunctionForm(LINEAR, matrix=model.F, offset=model.b, is_flow=model.continuous)
        with_form(flow if model.continuous else move, form)
    if model.D is None and (model.d is None or model.d.ndim == 1):
        with_form(observe, FunctionForm(LINEAR, matrix=model.H, offset=model.d))
    return NonlinearMode(flow if model.continuous else move, model.Q, observe, model.R, model.continuous)


def _is_nilpotent(A: Tensor) -> bool:
    """Return True if A is nilpotent, so that the series of exp(A dt) is finite; False if A needs derivatives."""
    constant = not A.requires_grad and torch.autograd.forward_ad.unpack_dual(A).tangent is None
    return has_values(A) and constant and not bool(torch.linalg.matrix_power(A, A.shape[-1]).any())


def _embed(mode: NonlinearMode, E: Tensor, indices: list[int]) -> NonlinearMode:
    """Embed a mode of some components in the full state; the other components become 0."""
    places = torch.tensor(indices, device=E.device)  # a list would be copied to the device in every step

    def move(x: Tensor, *u: Tensor) -> Tensor:
        return E @ mode.move(x[places], *u)

    def observe(x: Tensor, *u: Tensor) -> Tensor:
        return mode.observe(x[places], *u)

    for embedded, function in ((move, mode.move), (observe, mode.observe)):
        if isinstance(form := getattr(function, "form", None), FunctionForm):
            with_form(embedded, form.embedded(indices, E, is_motion=embedded is move))
    return NonlinearMode(move, E @ mode.Q @ E.mT, observe, mode.R, mode.continuous)
