"""Accuracy of the switching filters and smoothers on two manoeuvres, against filterpy's IMM and near-exact filters.

python benchmarks/filter_quality.py             100 runs of each, about ten minutes; results/filter_quality.json
python benchmarks/filter_quality.py picture     one run of the turns, drawn to docs/pictures/smoothing.svg

The exact filter has k^t Gaussians. It is approximated by `gpb` at a depth from which on the results no longer change.
Rows with fewer Gaussians, and with particles, which converge to the same filter, show how close the approximation is.

Errors are those of position and velocity. NEES is that of both, divided by their number: a consistent filter has 1, an
overconfident one more. Mode accuracy is the share of steps at which the most probable mode is the true one. The delay
of a switch is the number of steps until the new mode is the most probable for the first time, or the length of its stay
if it never is. Runs are independent: confidence intervals are 1.96 standard errors of their means.

Manoeuvres happen at fixed times, which the models do not describe. As many runs have modes drawn from the transition
matrix, so that the model is correct. There the NEES of the exact filter is 1 on average, also for a mixture, since
E (x - m)^T P^-1 (x - m) is the trace of P^-1 P. The log likelihood lost relative to it is a divergence, 0 for the exact
filter only.
"""

import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filterpy.kalman import IMMEstimator, KalmanFilter

from gradlogz import Prior, SwitchingModel, gpb1, gpb2, imm, smooth
from gradlogz.filters import (
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    enumerate_modes,
    gpb,
    rao_blackwell_filter,
)

ROOT = Path(__file__).parents[1]
RUNS = 100
F64 = torch.float64


class Scenario(NamedTuple):
    """A model, its prior, and the true mode of every step."""

    name: str
    model: SwitchingModel
    start: Prior
    modes: torch.Tensor  # [t]
    position: tuple[int, int]
    velocity: tuple[int, int]


class Estimate(NamedTuple):
    mean: torch.Tensor  # [runs, t, s]
    covariance: torch.Tensor
    probability: torch.Tensor  # [runs, t, k]
    log_likelihood: torch.Tensor | None  # [runs], None if the filter does not return it


def accelerating() -> Scenario:
    """Demonstration of ekfukf: constant velocity, with acceleration at steps 51-70 and 121-150.   [hartikainen11]"""
    options: dict[str, Any] = {"dt": 0.1, "observation_variance": 0.1, "dtype": F64}
    slow = constant_velocity(2, spectral_density=0.01, derivatives=3, **options)
    fast = constant_acceleration(2, spectral_density=1.0, **options)
    chain = torch.tensor([[0.98, 0.02], [0.02, 0.98]], dtype=F64)
    modes = torch.zeros(200, dtype=torch.long)
    modes[50:70] = modes[120:150] = 1
    start = Prior(
        torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, 0.0], dtype=F64),
        torch.diag(torch.tensor([0.1, 0.1, 0.5, 0.1, 0.1, 0.5], dtype=F64)),
        torch.tensor([0.9, 0.1], dtype=F64).log(),
    )
    model = SwitchingModel.of([slow, fast], transition=chain)
    return Scenario("velocity and acceleration", model, start, modes, (0, 3), (1, 4))


def turning() -> Scenario:
    """Straight flight with a left and a right turn: 120 s at about 15 m/s, observed every second with 5 m noise."""
    options: dict[str, Any] = {"dt": 1.0, "spectral_density": 0.1, "observation_variance": 25.0, "dtype": F64}
    left, right = (coordinated_turn(2, rate=rate, **options) for rate in (0.15, -0.15))
    chain = torch.tensor([[0.94, 0.03, 0.03], [0.05, 0.95, 0.0], [0.05, 0.0, 0.95]], dtype=F64)
    modes = torch.zeros(120, dtype=torch.long)
    modes[30:50], modes[75:95] = 1, 2
    start = Prior(
        torch.tensor([0.0, 15.0, 0.0, 0.0], dtype=F64),
        torch.diag(torch.tensor([25.0, 4.0, 25.0, 4.0], dtype=F64)),
        torch.tensor([0.9, 0.05, 0.05], dtype=F64).log(),
    )
    model = SwitchingModel.of([constant_velocity(2, **options), left, right], transition=chain)
    return Scenario("coordinated turns", model, start, modes, (0, 2), (1, 3))


def chained(scenario: Scenario, runs: int, generator: torch.Generator) -> torch.Tensor:
    """Draw modes [runs, t] from the transition matrix of the model."""
    now, modes = scenario.start.log_mode_probability.exp().expand(runs, -1), []
    for _ in scenario.modes:
        before = torch.multinomial(now, 1, generator=generator).squeeze(-1) if not modes else modes[-1]
        modes.append(torch.multinomial(scenario.model.transition[before], 1, generator=generator).squeeze(-1))
    return torch.stack(modes, -1)


def drawn(scenario: Scenario, modes: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw states and observations for modes [runs, t], with the noise and the prior of the model."""
    model, runs = scenario.model, len(modes)

    def noise(covariance: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        z = torch.randn(runs, root.shape[-1], dtype=F64, generator=generator)
        return (root @ z.unsqueeze(-1)).squeeze(-1)

    x, states, observations = scenario.start.mean + noise(scenario.start.covariance), [], []
    for j in modes.unbind(-1):
        x = (model.F[j] @ x.unsqueeze(-1)).squeeze(-1) + noise(model.Q[j])
        states.append(x)
        observations.append((model.H[j] @ x.unsqueeze(-1)).squeeze(-1) + noise(model.R[j]))
    return torch.stack(states, 1), torch.stack(observations, 1)


def of_filterpy(scenario: Scenario, y: torch.Tensor) -> Estimate:
    """Run filterpy's IMMEstimator on every series."""
    model, parts = scenario.model, ([], [], [])
    for series in y.numpy():
        bank = []
        for j in range(model.modes):
            kalman = KalmanFilter(dim_x=model.state_size, dim_z=model.observation_size)
            kalman.x, kalman.P = scenario.start.mean.numpy().copy(), scenario.start.covariance.numpy().copy()
            kalman.F, kalman.Q, kalman.H, kalman.R = (getattr(model, n)[j].numpy() for n in "FQHR")
            bank.append(kalman)
        begins = scenario.start.log_mode_probability.exp().numpy()
        other, rows = IMMEstimator(bank, begins, model.transition.numpy()), ([], [], [])
        for z in series:
            other.predict()
            other.update(z)
            for row, value in zip(rows, (other.x, other.P, other.mu), strict=True):
                row.append(np.array(value))
        for part, row in zip(parts, rows, strict=True):
            part.append(np.stack(row))
    return Estimate(*(torch.from_numpy(np.stack(part)) for part in parts), None)


def ours(filter: Callable[..., Any], **options: Any) -> Callable[[Scenario, torch.Tensor], Estimate]:
    def run(scenario: Scenario, y: torch.Tensor) -> Estimate:
        result = filter(scenario.model, y, scenario.start, **options)
        result = getattr(result, "filtered", result) if filter is not smooth else result
        log_likelihood = None if filter is smooth else result.log_likelihood
        return Estimate(result.mean, result.covariance, result.log_mode_probability.exp(), log_likelihood)

    return run


def deep(two: int, three: int) -> Callable[[Scenario, torch.Tensor], Estimate]:
    """Return `gpb` of a depth for models of two modes, and of another depth for models of three."""

    def run(scenario: Scenario, y: torch.Tensor) -> Estimate:
        return ours(gpb, depth=two if scenario.model.modes == 2 else three)(scenario, y)

    return run


def seeded(particles: int) -> Callable[[Scenario, torch.Tensor], Estimate]:
    def run(scenario: Scenario, y: torch.Tensor) -> Estimate:
        return ours(rao_blackwell_filter, particles=particles, generator=torch.Generator().manual_seed(0))(scenario, y)

    return run


NEAREST = "gpb, 8192 Gaussians or 6561"
FILTERS = {
    "filterpy, IMM": of_filterpy,
    "imm": ours(imm),
    "gpb1": ours(gpb1),
    "gpb2": ours(gpb2),
    "gpb, 128 Gaussians or 81": deep(8, 5),
    "gpb, 1024 Gaussians or 729": deep(11, 7),
    NEAREST: deep(14, 9),
    "rao_blackwell, 100 particles": seeded(100),
    "rao_blackwell, 400 particles": seeded(400),
    "exact, the likeliest 100": ours(enumerate_modes, max_histories=100),
}
SMOOTHERS = {
    "smooth, lag 5, gpb2": ours(smooth, method="gpb2", lag=5),
    "smooth, imm": ours(smooth, method="imm"),
    "smooth, gpb2": ours(smooth, method="gpb2"),
    "smooth, kim": ours(smooth, method="kim"),
}


def interval(values: torch.Tensor) -> list[float]:
    """Return the mean over runs and the half-width of its 95 % confidence interval."""
    return [round(float(values.mean()), 4), round(1.96 * float(values.std()) / math.sqrt(len(values)), 4)]


def distance(scenario: Scenario, x: torch.Tensor, estimate: Estimate) -> torch.Tensor:
    """Return the mean NEES of position and velocity in each run, divided by their number, [runs]."""
    both = [*scenario.position, *scenario.velocity]
    error, P = (estimate.mean - x)[..., both], estimate.covariance[..., both, :][..., both]
    return (error * torch.linalg.solve(P, error.unsqueeze(-1)).squeeze(-1)).sum(-1).mean(-1) / len(both)


def judged(scenario: Scenario, x: torch.Tensor, estimate: Estimate) -> dict[str, list[float]]:
    """Return the errors, NEES, mode accuracy and delay of a filter, each with its confidence interval."""
    error = estimate.mean - x
    likeliest, true = estimate.probability.argmax(-1), scenario.modes
    switches = [t for t in range(1, len(true)) if true[t] != true[t - 1]]
    ends = [*switches[1:], len(true)]
    waits = []
    for begin, end in zip(switches, ends, strict=True):
        there = likeliest[:, begin:end] == true[begin]
        waits.append(torch.where(there.any(-1), there.int().argmax(-1), end - begin).to(F64))
    return {
        "position": interval(error[..., scenario.position].square().sum(-1).mean(-1).sqrt()),
        "velocity": interval(error[..., scenario.velocity].square().sum(-1).mean(-1).sqrt()),
        "nees": interval(distance(scenario, x, estimate)),
        "mode": interval((likeliest == true).to(F64).mean(-1)),
        "delay": interval(torch.stack(waits).mean(0)),
    }


def rows() -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    for scenario in (accelerating(), turning()):
        fixed, random = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        x, y = drawn(scenario, scenario.modes.expand(RUNS, -1), fixed)
        x_random, y_random = drawn(scenario, chained(scenario, RUNS, random), random)
        begin, likelihoods = len(table), {}
        for kind, alternatives in (("filter", FILTERS), ("smoother", SMOOTHERS)):
            for name, run in alternatives.items():
                start = time.perf_counter()
                with torch.no_grad():
                    row = judged(scenario, x, run(scenario, y))
                    estimate = run(scenario, y_random)
                row["nees drawn"] = interval(distance(scenario, x_random, estimate))
                likelihoods[name] = estimate.log_likelihood
                table.append({"scenario": scenario.name, "kind": kind, "name": name, "runs": RUNS, **row})
                print(f"{time.perf_counter() - start:6.1f} s", table[-1], flush=True)
        for row in table[begin:]:
            if (likelihood := likelihoods[row["name"]]) is not None and row["name"] != NEAREST:
                row["lost"] = interval(likelihoods[NEAREST] - likelihood)
    return table


def picture(path: Path) -> None:
    """Draw one run of the turns: true and estimated tracks, and mode probabilities of filter and smoother."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    scenario = turning()
    modes = scenario.modes.expand(RUNS, -1)
    x, y = (part[:1] for part in drawn(scenario, modes, torch.Generator().manual_seed(0)))
    back = smooth(scenario.model, y, scenario.start, method="gpb2")
    forward = back.filtered
    colours = {"filter": "#c8781e", "smoother": "#2b5d9b"}
    figure, (plane, steps) = pyplot.subplots(
        1, 2, figsize=(9.2, 4.0), layout="constrained", gridspec_kw={"width_ratios": [1, 1.35]}
    )
    at = scenario.position
    plane.plot(*y[0].mT, ".", color="#999999", markersize=3.5, label="seen")
    plane.plot(*x[0][:, at].mT, color="#222222", linewidth=3.5, alpha=0.25, label="true")
    plane.plot(*forward.mean[0][:, at].mT, color=colours["filter"], linewidth=1.1, label="filter")
    plane.plot(*back.mean[0][:, at].mT, color=colours["smoother"], linewidth=1.4, label="smoother")
    plane.set(xlabel="east, m", ylabel="north, m", aspect="equal", title="where it is")
    plane.legend(frameon=False, loc="best", fontsize=8)
    time_of = range(1, len(scenario.modes) + 1)
    for mode, (offset, name) in enumerate(((2.5, "straight"), (1.25, "left"), (0.0, "right"))):
        true = (scenario.modes == mode).to(F64)
        steps.fill_between(time_of, offset, offset + true, step="mid", color="#222222", alpha=0.12, linewidth=0)
        for label, estimate in (("filter", forward), ("smoother", back)):
            p = estimate.log_mode_probability[0, :, mode].exp()
            steps.plot(time_of, offset + p, color=colours[label], linewidth=1.2)
        steps.annotate(name, (1, offset + 0.5), (-6, 0), textcoords="offset points", ha="right", va="center")
        steps.axhline(offset, color="#bbbbbb", linewidth=0.6)
    steps.set(xlabel="time, s", xlim=(1, len(true)), yticks=[], title="probability of each mode, true ones shaded")
    for axes in (plane, steps):
        axes.spines[["top", "right"]].set_visible(False)
    steps.spines["left"].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    table = {"benchmark": "filter_quality", **versions, "rows": rows()}
    path = ROOT / "benchmarks" / "results" / "filter_quality.json"
    path.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["picture"]:
        picture(ROOT / "docs" / "pictures" / "smoothing.svg")
    else:
        main()
