"""A call of every public function of the filters, for any device and dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

import gradlogz
from gradlogz import (
    AttentionFilter,
    ConjugateFilter,
    Empirical,
    Gaussian,
    Prior,
    Series,
    SwitchingFilter,
    SwitchingModel,
    fit,
    imm,
    smooth,
)
from gradlogz.filters import (
    BetaBinomial,
    DirichletMultinomial,
    Discount,
    GammaExponential,
    GammaPoisson,
    Generator,
    InverseWishartNormal,
    LinearGaussian,
    LinearMotion,
    NonlinearModel,
    Reset,
    Slots,
    association_probability,
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    discretize,
    discretize_chain,
    enumerate_modes,
    filter_in_blocks,
    gpb,
    in_gate,
    innovation_scores,
    is_closed_under,
    linear_link,
    nees,
    normalized_innovation,
    prior_with_clutter,
    rao_blackwell_filter,
    singer,
    unknown_turn,
    with_clutter,
    without_clutter,
)
from support.smoother_oracles import drawn
from support.switching_oracles import F64, beginning, chain, observed, positive, system


class Place(NamedTuple):
    """A device and a dtype."""

    device: str = "cpu"
    dtype: torch.dtype = F64

    def __call__(self, data: Any) -> Any:
        """Move tensors, or a pytree of tensors, to this device and dtype."""

        def moved(t: Tensor) -> Tensor:
            return t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)

        return tree_map_only(Tensor, moved, data)


Call = Callable[[Place], Any]
CALLS: dict[str, Callable[[], Call]] = {}  # functions that draw data on the CPU and return a call that uses them


def call(name: str) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Register a call; the part of its name before a colon is the public name."""

    def register(prepare: Callable[[], Call]) -> Callable[[], Call]:
        CALLS[name] = prepare
        return prepare

    return register


def same_everywhere(actual: Any, expected: Any, *, tolerance: float = 1e-10, device: str = "cpu") -> None:
    """Assert that all tensors of two results agree relative to their largest entry, and are on the right device."""
    (results, form), (wanted, wanted_form) = tree_flatten(actual), tree_flatten(expected)
    assert form == wanted_form
    for i, (a, e) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(e, Tensor):
            assert a == e
            continue
        assert a.device.type == device, f"leaf {i} of shape {tuple(e.shape)} on {a.device}"
        size = 1 + (float(e[e.isfinite()].abs().max()) if e.is_floating_point() and e.isfinite().any() else 0.0)
        a = a.to("cpu", e.dtype)
        torch.testing.assert_close(
            a, e, rtol=0, atol=tolerance * size, equal_nan=True, msg=lambda m, i=i: f"leaf {i}: {m}"
        )


def series(k=3, s=4, o=2, *, steps=6, targets=5, **more):
    """Return a system, observations with gaps, a mask and lengths, and a prior."""
    model, start = system(k, s, o, **more), beginning(k, s)
    y = observed(model, steps, targets)
    y[1, 2], y[2, 1, 0] = torch.nan, torch.nan
    mask = torch.rand(targets, steps) < 0.8
    lengths = torch.arange(steps, steps - targets, -1).clamp(min=0)
    return model, Series(y, mask=mask, lengths=lengths), start


# Linear systems ------------------------------------------------------------------------------------------------------


for name in ("gpb1", "gpb2", "imm"):

    @call(name)
    def _(name=name):
        data = series()

        def run(at):
            return getattr(gradlogz.filters, name)(*at(data))

        return run


@call("gpb: depth 3, modes of unequal sizes")
def _():
    data = series(components=((0, 1), (0, 1, 2), (1, 2, 3)))

    def run(at):
        return gpb(*at(data), depth=3)

    return run


@call("imm: some fields, of the last step")
def _():
    data = series()

    def run(at):
        return imm(*at(data), keep="last", fields=("mean", "log_mode_probability"))

    return run


@call("imm: inputs")
def _():
    model, y, prior = series()
    B, D = torch.randn(3, 4, 2, dtype=F64), torch.randn(3, 2, 2, dtype=F64)
    data = (
        {name: getattr(model, name) for name in ("transition", "F", "Q", "H", "R")} | {"B": B, "D": D},
        (replace(y, inputs=torch.randn(6, 2, dtype=F64)), prior),
    )

    def run(at):
        fields, (y, prior) = at(data)
        return imm(SwitchingModel(**fields), y, prior)

    return run


def flowing():
    """Return fields of a continuous-time model, observations at irregular times, and a prior."""
    model, y, prior = series(offsets=True)
    rate = torch.rand(3, 3, dtype=F64)
    fields = {name: getattr(model, name) for name in ("Q", "H", "R", "b", "d")}
    fields |= {"transition": Generator(rate - torch.diag(rate.sum(-1))), "F": model.F - 2 * torch.eye(4, dtype=F64)}
    times = (torch.rand(*y.observations.shape[:-1], dtype=F64) ** 3 * 3).cumsum(-1)
    times[0, 1] = times[0, 0]
    return fields, replace(y, times=times), prior


@call("SwitchingModel: at")
def _():
    data = flowing()

    def run(at):
        fields, y, _ = at(data)
        return SwitchingModel(**fields).at(y.times)

    return run


@call("SwitchingModel: still_first, of targets")
def _():
    model = system(2, 2, 1, lead=(3, 5))
    unequal = SwitchingModel(**model.fields(), components=((0,), (0, 1)))

    def run(at):
        here, parts = at((model, unequal))
        return here.still_first(5), here.narrow(2), parts.has, parts.parameters()

    return run


@call("SwitchingFilter: one by one, at any time")
def _():
    fields, y, prior = flowing()
    dt = y.times.diff(dim=-1, prepend=torch.zeros(5, 1, dtype=F64))
    data = fields, y.observations, prior, y.mask, dt

    def run(at):
        fields, y, prior, mask, dt = at(data)
        online = SwitchingFilter(SwitchingModel(**fields), "gpb")
        state, results = online.init(prior, batch_shape=(5,)), []
        for t in range(3):
            state, step = online.step(state, y[:, t], mask=mask[:, t], dt=dt[:, t])
            results.append(step)
        return results, state, online.step(state, y[:, 3], dt=0.25)

    return run


for name in ("imm", "gpb2", "kim", "enumerate"):

    @call(f"smooth: {name}")
    def _(name=name):
        data = series(steps=4, targets=4)

        def run(at):
            return smooth(*at(data), method=name)

        return run


@call("smooth: a few steps later")
def _():
    data = series()

    def run(at):
        return [smooth(*at(data), method=method, lag=2) for method in ("imm", "gpb2", "kim")]

    return run


@call("smooth: the likeliest histories")
def _():
    model, y, prior = series()
    data = model, replace(y, lengths=None), prior  # histories that nothing is seen of are as likely as each other

    def run(at):
        return smooth(*at(data), method="enumerate", max_histories=10)

    return run


@call("smooth: many targets")  # libraries choose other ways for many matrices
def _():
    model, start = system(3, 4, 2), beginning(3, 4)
    data = model, observed(model, 4, 400), start

    def run(at):
        model, y, start = at(data)
        return smooth(model, y, start)

    return run


@call("smooth: modes of unequal sizes")
def _():
    data = series(components=((0, 1), (0, 1, 2), (1, 2, 3)))

    def run(at):
        return [smooth(*at(data), method=method) for method in ("imm", "gpb2")]

    return run


@call("smooth: at any time")
def _():
    data = flowing()

    def run(at):
        fields, y, prior = at(data)
        return smooth(SwitchingModel(**fields), y, prior)

    return run


@call("enumerate_modes: the likeliest histories")
def _():
    model, y, prior = series()
    data = model, replace(y, lengths=None), prior  # histories that nothing is seen of are as likely as each other

    def run(at):
        return enumerate_modes(*at(data), max_histories=20)

    return run


@call("rao_blackwell_filter: nothing left to chance")  # a chain that cannot but go round
def _():
    model, y, prior = series(transition=torch.eye(3, dtype=F64).roll(1, 0))
    data = model, y, replace(prior, log_mode_probability=torch.tensor([-torch.inf, 0.0, -torch.inf], dtype=F64))

    def run(at):
        return rao_blackwell_filter(*at(data), particles=7)

    return run


@call("with_clutter")
def _():
    model, y, prior = series(targets=4)
    data = model, y, prior, 100 * torch.eye(2, dtype=F64)

    def run(at):
        model, y, prior, covariance = at(data)
        return imm(with_clutter(model, 0.05, covariance), y, prior_with_clutter(prior))

    return run


@call("prior_with_clutter")
def _():
    prior = beginning(3, 4)

    def run(at):
        return prior_with_clutter(at(prior))

    return run


@call("without_clutter")
def _():
    log_p = torch.randn(5, 7, 6, dtype=F64).log_softmax(-1)

    def run(at):
        return without_clutter(at(log_p))

    return run


@call("innovation_scores")
def _():
    data = series()

    def run(at):
        filtered = imm(*at(data))
        return innovation_scores(filtered), innovation_scores(filtered, joint=False)

    return run


@call("association_probability")
def _():
    log_density = torch.randn(5, 3, dtype=F64)
    log_density[1, 2], log_density[2] = torch.nan, -torch.inf

    def run(at):
        return association_probability(
            at(log_density), detection_probability=0.8, log_clutter_density=-1.0, gate_probability=0.95
        )

    return run


@call("filter_in_blocks")
def _():
    model, prior = system(2, 3, 2), beginning(2, 3)
    data = model, observed(model, 60, 1)[0], prior

    def run(at):
        return filter_in_blocks(*at(data), block=16, overlap=4, tolerance=0.0).filtered

    return run


# Functions -----------------------------------------------------------------------------------------------------------


RATE = torch.tensor([[-0.3, 0.3], [0.2, -0.2]], dtype=F64)
CHAIN = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
ERRORS = torch.tensor([[0.5, 0.0], [0.0, 0.01]], dtype=F64)  # of ranges and bearings


def turning(at, method, **options):
    """Return a model of targets that fly straight or turn, observed by a radar."""
    noise = {"spectral_density": 0.1, "observation_variance": 1.0, "dtype": at.dtype, "device": at.device}
    straight = constant_velocity(2, dt=1.0, **noise)
    turn = unknown_turn(2, dt=1.0, rate_density=0.01, **noise)
    return NonlinearModel.of(
        [straight, turn],
        transition=at(CHAIN),
        components=[(0, 1, 2, 3), range(5)],
        observe=gradlogz.filters.range_bearing(0, 2, origin=(-20.0, 1.0)),
        R=at(ERRORS),
        residual=gradlogz.filters.wrap_angles(1),
        method=method,
        **options,
    )


def radar():
    """Return a prior and radar observations of such targets, with bearings that wrap around."""
    steps = torch.arange(6, dtype=F64)
    y = torch.stack((20 + steps, torch.remainder(3.0 + 0.1 * steps + torch.pi, 2 * torch.pi) - torch.pi), -1)
    y = y + 0.1 * torch.randn(4, 6, 2, dtype=F64)
    y[1, 2], y[2, 3, 1] = torch.nan, torch.nan
    mean = torch.tensor([-40.0, -1.0, 2.0, 0.5, 0.1], dtype=F64)
    return y, Prior(mean, torch.diag(torch.tensor([4.0, 1.0, 4.0, 1.0, 0.1], dtype=F64)))


for name in ("unknown_turn", "range_bearing", "wrap_angles"):
    for method in ("ekf", "ukf"):

        @call(f"{name}: {method}")
        def _(method=method, name=name):
            data = radar()
            chosen = {"unknown_turn": "imm", "range_bearing": "gpb1", "wrap_angles": "gpb2"}[name]

            def run(at):
                y, start = at(data)
                return getattr(gradlogz.filters, chosen)(turning(at, method), y, start)

            return run


@call("range_bearing_elevation: at any time")
def _():
    y = torch.tensor([30.0, 3.1, 0.2], dtype=F64) + 0.1 * torch.randn(4, 6, 3, dtype=F64)
    y[1, 2], y[2, 3, 2] = torch.nan, torch.nan
    times = torch.rand(4, 6, dtype=F64).cumsum(-1)
    start = Prior(torch.tensor([-30.0, 1.0, 1.0, 0.0, 6.0, 0.0], dtype=F64), positive(6))
    R = torch.diag(torch.tensor([0.5, 0.01, 0.01], dtype=F64))

    def run(at):
        here, begins, when = at((y, start, times))
        noise = {"observation_variance": 1.0, "dtype": at.dtype, "device": at.device}
        model = NonlinearModel.of(
            [constant_velocity(3, spectral_density=density, **noise) for density in (0.01, 1.0)],
            transition=Generator(at(RATE)),
            observe=gradlogz.filters.range_bearing_elevation(),
            R=at(R),
            residual=gradlogz.filters.wrap_angles(1, 2),
            method="ukf",
        )
        return imm(model, Series(here, times=when), begins)

    return run


for method in ("ekf", "ukf"):

    @call(f"smooth: functions, {method}")
    def _(method=method):
        data = radar()

        def run(at):
            y, start = at(data)
            model = turning(at, method)
            results = [smooth(model, y, start, method=name) for name in ("imm", "gpb2")]
            return results, smooth(model, y, start, lag=1)

        return run


def bending(at, method, **options):
    """Return a continuous-time model of targets that turn, with and without damping of their speed."""
    noise = {"spectral_density": 0.1, "observation_variance": 1.0, "dtype": at.dtype, "device": at.device}
    turn = unknown_turn(2, rate_density=0.01, **noise)

    def drift(x):
        return torch.stack((x[1], -0.1 * x[1] - x[4] * x[3], x[3], -0.1 * x[3] + x[4] * x[1], -0.2 * x[4]))

    damped = turn._replace(move=gradlogz.filters.follow_drift(drift))
    return NonlinearModel.of([turn, damped], transition=Generator(at(RATE)), method=method, **options)


@call("follow_drift: at any time")
def _():
    _, start = radar()
    y, times = 3 * torch.randn(4, 6, 2, dtype=F64), (torch.rand(4, 6, dtype=F64) * 2).cumsum(-1)
    y[1, 2], y[2, 3, 1], times[0, 1] = torch.nan, torch.nan, times[0, 0]

    def run(at):
        here, begins, when = at((y, start, times))
        results = [imm(bending(at, method), Series(here, times=when), begins) for method in ("ekf", "ukf")]
        return results, smooth(bending(at, "ekf"), Series(here, times=when), begins)

    return run


@call("smooth: histories of functions")
def _():
    data = radar()

    def run(at):
        y, start = at(data)
        return smooth(turning(at, "ekf", fill="zero"), y[:, :4], start, method="enumerate")

    return run


@call("enumerate_modes: functions")
def _():
    data = radar()

    def run(at):
        y, start = at(data)
        return enumerate_modes(turning(at, "ukf", fill="zero"), y[:, :4], start)

    return run


# Motion --------------------------------------------------------------------------------------------------------------


for name in ("random_walk", "constant_velocity", "constant_acceleration"):

    @call(name)
    def _(name=name):
        data = torch.rand((), dtype=F64), torch.ones(4, dtype=F64)

        def run(at):
            make, (density, steps) = getattr(gradlogz.filters, name), at(data)
            numbers = {"spectral_density": density, "observation_variance": 1.0}
            return make(2, dt=0.3, **numbers), make(3, **numbers), make(1, dt=steps, **numbers)

        return run


@call("singer")
def _():
    tau = torch.tensor(20.0, dtype=F64)

    def run(at):
        return singer(2, dt=0.3, correlation_time=at(tau), acceleration_variance=2.0, observation_variance=1.0)

    return run


@call("coordinated_turn")
def _():
    rate = torch.tensor(0.2, dtype=F64)

    def run(at):
        return coordinated_turn(2, dt=0.3, rate=at(rate), spectral_density=0.1, observation_variance=1.0)

    return run


@call("constant_velocity: of a device that is named")
def _():
    noise, T = {"spectral_density": 0.1, "observation_variance": 1.0}, chain(2)

    def run(at):
        numbers = {"dtype": at.dtype, "device": torch.device(at.device)}
        pair = [constant_velocity(2, dt=1.0, **noise, **numbers), constant_acceleration(2, dt=1.0, **noise, **numbers)]
        return SwitchingModel.of(pair, transition=at(T), components=[(0, 1, 3, 4), range(6)])

    return run


@call("discretize")
def _():
    # A GPU doubles short steps as often as the longest would need that it can be given.
    data = torch.randn(3, 4, 4, dtype=F64) - 6 * torch.eye(4, dtype=F64), positive(3, 4), 10 ** torch.arange(-9.0, 10)

    def run(at):
        drift, density, dt = at(data)
        return discretize(drift, density, dt.unsqueeze(-1))

    return run


@call("discretize_chain")
def _():
    rate = torch.rand(4, 4, dtype=F64)
    data = rate - torch.diag(rate.sum(-1)), 10 ** torch.arange(-9.0, 10)

    def run(at):
        return discretize_chain(*at(data))

    return run


# Learning ------------------------------------------------------------------------------------------------------------


def taught(targets=12, steps=15):
    """Return series of a known system, and another system as the start of the fit."""
    k, s = 2, 2
    fields = {
        "transition": CHAIN,
        "F": torch.stack((0.9 * torch.eye(s, dtype=F64), torch.tensor([[0.5, 0.4], [-0.4, 0.5]], dtype=F64))),
        "Q": positive(k, s),
        "H": torch.randn(k, 2, s, dtype=F64),
        "R": positive(k, 2, scale=0.3),
        "b": torch.randn(k, s, dtype=F64),
        "d": torch.randn(k, 2, dtype=F64),
    }
    start = Prior(torch.zeros(s, dtype=F64), torch.eye(s, dtype=F64))
    y = drawn(SwitchingModel(**fields), start, steps, targets)[2]
    y[0, 3], y[1, 2, 0] = torch.nan, torch.nan
    lengths = torch.full((targets,), steps)
    lengths[2] = 5
    fields |= {"Q": 2 * fields["Q"], "R": 0.7 * fields["R"], "F": fields["F"] + 0.1}
    return SwitchingModel(**fields), Series(y, lengths=lengths), start


for method, learn in {"em": ("transition", "F", "Q", "H", "R", "b", "d", "initial"), "gradient": ("Q", "d")}.items():

    @call(f"fit: {method}")
    def _(method=method, learn=learn):
        data = taught()

        def run(at):
            iterations = 5 if method == "em" else 1
            return fit(*at(data), learn=learn, method=method, max_iterations=iterations, tolerance=0.0)

        return run


@call("fit: errors, of few series and of many")
def _():
    data = taught(90, 6)

    def run(at):
        model, y, prior = at(data)
        numbers = {"learn": ["Q"], "structure": {"Q": "diagonal"}, "max_iterations": 2, "errors": True}
        few = fit(model, Series(y.observations[:5], lengths=y.lengths[:5]), prior, **numbers)
        return few, fit(model, y, prior, smoother="imm", **numbers)

    return run


@call("fit: a component that is always 0")  # whose sums are singular
def _():
    model, y, prior = taught()
    wide = torch.nn.functional.pad
    fields = {"F": wide(model.F, (0, 1, 0, 1)), "Q": wide(model.Q, (0, 1, 0, 1)), "H": wide(model.H, (0, 1))}
    fields |= {"transition": model.transition, "R": model.R, "b": wide(model.b, (0, 1)), "d": model.d}
    data = SwitchingModel(**fields), y, Prior(wide(prior.mean, (0, 1)), wide(prior.covariance, (0, 1, 0, 1)))

    def run(at):
        return [fit(*at(data), learn=learn, max_iterations=3) for learn in (["F"], ["F", "b"], ["H", "R"])]

    return run


# Conjugate families --------------------------------------------------------------------------------------------------


def conjugate():
    """Return families with a prior, observations with gaps, and dynamics, by name."""
    counts = torch.poisson(torch.full((3, 5, 2), 3.0, dtype=F64))
    counts[0, 2, 1] = torch.nan
    categories = torch.poisson(torch.full((3, 5, 3), 2.0, dtype=F64))
    categories[0, 2] = torch.nan
    number = torch.tensor
    W = torch.randn(2, 2, dtype=F64)
    model = system(2, 2, 2)
    poisson, waiting, binomial = GammaPoisson(channels=2), GammaExponential(channels=2), BetaBinomial(20, channels=2)
    dirichlet, wishart = DirichletMultinomial(3), InverseWishartNormal(2)
    gaussian = LinearGaussian(model.H, model.R, model.d)
    a, b = number([2.0, 1.5], dtype=F64), number([1.0, 0.7], dtype=F64)
    y = observed(model, 5, 3)
    y[0, 2] = torch.nan
    scaling, swap = LinearMotion(torch.diag(number([1.1, 0.8], dtype=F64))), torch.eye(3, dtype=F64).roll(1, 0)
    affine = LinearMotion(model.F[0], model.b[0], model.Q[0])
    return {
        "GammaPoisson": (poisson, poisson.prior(a, b), counts, scaling),
        "GammaExponential": (waiting, waiting.prior(a + 1, b), counts + 0.5, scaling),
        "BetaBinomial": (binomial, binomial.prior(a, b), counts, LinearMotion(torch.eye(2, dtype=F64))),
        "DirichletMultinomial": (
            dirichlet,
            dirichlet.prior(number([1.0, 2.0, 0.5], dtype=F64)),
            categories,
            LinearMotion(swap),
        ),
        "InverseWishartNormal": (wishart, wishart.prior(number(7.0, dtype=F64), positive(2)), y, LinearMotion(W)),
        "LinearGaussian": (gaussian, gaussian.prior(torch.randn(2, dtype=F64), positive(2)), y, affine),
    }


FAMILIES = ("GammaPoisson", "GammaExponential", "BetaBinomial", "DirichletMultinomial", "InverseWishartNormal")

for name in (*FAMILIES, "LinearGaussian"):
    for method, depth in (("imm", 2), ("gpb", 1), ("gpb", 3)):

        @call(f"ConjugateFilter: {name}, {method} {depth}")
        def _(name=name, method=method, depth=depth):
            data, T, lengths = conjugate()[name], chain(2), torch.tensor([5, 5, 3])

            def run(at):
                (family, prior, y, motion), transition = at((data, T))
                dynamics = (motion, Discount(0.9, prior)) if depth < 3 else (Discount(0.95), Reset(prior))
                chosen = ConjugateFilter(family, transition=transition, dynamics=dynamics, method=method, depth=depth)
                return chosen.filter(Series(y, lengths=at(lengths)), prior=prior)

            return run


@call("is_closed_under")
def _():
    data = conjugate()
    keys = torch.tensor([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], dtype=F64)
    third = torch.tensor([[-0.5, -(0.75**0.5)], [0.75**0.5, -0.5]], dtype=F64)
    S = positive(2)

    def run(at):
        results = [is_closed_under(family, motion) for family, _, _, motion in at(data).values()]
        turn, points = LinearMotion(at(third)), at(keys)
        results += [is_closed_under(Empirical(points, w), turn) for w in (None, points.sum(-1), points[:, 0] ** 3)]
        return [*results, is_closed_under(Gaussian(at(S[0]), at(S)), turn)]

    return run


# Attention -----------------------------------------------------------------------------------------------------------


def message():
    slots = Slots(torch.randn(2, 5, 3, dtype=F64), positive(2, 5, 3), torch.randn(2, 5, dtype=F64).log_softmax(-1))
    return slots, torch.randn(2, 4, 3, dtype=F64), torch.randn(3, 3, dtype=F64), positive(3)


OPTIONS = {
    "mean": {},
    "covariance": {"message": "covariance"},
    "state": {"message": "covariance", "coupling": "state"},
    "normalizer": {"message": "covariance", "weights": "normalizer"},
    "sinkhorn": {"weights": "sinkhorn", "scale": 0.3},
}

for name, options in OPTIONS.items():

    @call(f"AttentionFilter: {name}")
    def _(options=options):
        data = message()

        def run(at):
            slots, eta, value, noise = at(data)
            noise = noise if options.get("message") else None
            chosen = AttentionFilter(value=value, noise=noise, **options)
            return chosen.step(slots, eta), chosen.dropped(slots, eta), chosen.chain(slots, eta)

        return run


for name in ("attentive_gpb1", "attentive_imm", "attentive_gpb2", "attended_model"):

    @call(name)
    def _(name=name):
        data, eta = series(), torch.randn(3, 4, dtype=F64)

        def run(at):
            result = getattr(gradlogz.filters, name)(*at(data), eta=at(eta))
            return result.transition if name == "attended_model" else result

        return run


@call("fit_eta")
def _():
    data = series()

    def run(at):
        return gradlogz.filters.fit_eta(*at(data), method="imm", max_iterations=1).log_likelihood

    return run


@call("ConjugateWeights")
def _():
    eta, u = torch.randn(5, 3, dtype=F64), torch.randn(2, 6, 3, dtype=F64)

    def run(at):
        h = Gaussian(at(u)[0, 0], torch.eye(3, dtype=at(u).dtype, device=at(u).device))
        weights = gradlogz.filters.ConjugateWeights(h, at(eta))
        return weights.filter(at(u)), weights.attend(at(u), strength=2.0, value=at(eta))

    return run


@call("linear_link")
def _():
    points, eta = torch.randn(7, 3, dtype=F64), torch.randn(20, 3, dtype=F64)
    flat = points * torch.tensor([1.0, 1.0, 0.0], dtype=F64)  # means in a plane

    def run(at):
        return [linear_link(Empirical(at(x)), at(eta)) for x in (points, flat)]

    return run


# Whether filters are what they claim ---------------------------------------------------------------------------------


for name in ("normalized_innovation", "nees", "in_gate"):

    @call(name)
    def _(name=name):
        data = series()
        truth = torch.randn(5, 6, 4, dtype=F64)

        def run(at):
            results = imm(*at(data))
            if name == "nees":
                distance = nees(results, at(truth))
                return distance, distance.mean(), nees(smooth(*at(data)), at(truth)).holds
            if name == "in_gate":
                return in_gate(results.innovation, results.innovation_covariance)
            distance = normalized_innovation(results)
            return distance, distance.mean(-1)

        return run
