"""How good the switching filters and smoothers are, on two manoeuvres, beside filterpy's IMM and nearly exact ones.

python benchmarks/filter_quality.py             100 runs of each, some ten minutes; results/filter_quality.json
python benchmarks/filter_quality.py picture     one run of the turns, drawn to docs/pictures/smoothing.svg

The exact filter has k^t Gaussians. What stands for it is `gpb` of a depth at which nothing changes any more: rows of
fewer Gaussians, and of particles, which come to the same filter in another way, say how far that has been reached.

Errors are of position and velocity. NEES is of both together, divided by their number: 1 is what a filter should have,
more is too sure. A mode is right where the likeliest one is the true one. The delay of a switch is how many steps pass
until the new mode is the likeliest for the first time, the length of its stay if it never is. Runs are independent:
intervals are 1.96 standard errors of their averages.

Manoeuvres happen when they are told to, which no filter expects. As many runs have modes drawn from the chain, so that
the model is right. There the NEES of the exact filter is 1 on average, mixture or not, E (x - m)^T P^-1 (x - m) being
the trace of P^-1 P; and log likelihood that is lost to it is a divergence, 0 for the exact filter alone.
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
    """A model, how it begins, and the true mode of every step."""

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
    log_likelihood: torch.Tensor | None  # [runs], of filters that say it


def accelerating() -> Scenario:
    """The demonstration of ekfukf: constant velocity, and acceleration at steps 51-70 and 121-150.   [hartikainen11]"""
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
    """Straight, a left turn, straight, a right turn, straight: 120 s at about 15 m/s, seen within 5 m every second."""
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
    """Modes as the chain of the model goes, [runs, t]."""
    now, modes = scenario.start.log_mode_probability.exp().expand(runs, -1), []
    for _ in scenario.modes:
        before = torch.multinomial(now, 1, generator=generator).squeeze(-1) if not modes else modes[-1]
        modes.append(torch.multinomial(scenario.model.transition[before], 1, generator=generator).squeeze(-1))
    return torch.stack(modes, -1)


def drawn(scenario: Scenario, modes: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """States and observations of modes [runs, t]: noise of the model, and a beginning as it is believed."""
    model, runs = scenario.model, len(modes)

    def noise(covariance: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        z = torch.randn(runs, root.shape[-1], dtype=F64, generator=generator)
        return (root @ z.unsqueeze(-1)).squeeze(-1)

    x, states, seen = scenario.start.mean + noise(scenario.start.covariance), [], []
    for j in modes.unbind(-1):
        x = (model.F[j] @ x.unsqueeze(-1)).squeeze(-1) + noise(model.Q[j])
        states.append(x)
        seen.append((model.H[j] @ x.unsqueeze(-1)).squeeze(-1) + noise(model.R[j]))
    return torch.stack(states, 1), torch.stack(seen, 1)


def of_filterpy(scenario: Scenario, y: torch.Tensor) -> Estimate:
    """filterpy's IMMEstimator, run after run."""
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
        found = filter(scenario.model, y, scenario.start, **options)
        found = getattr(found, "filtered", found) if filter is not smooth else found
        told = None if filter is smooth else found.log_likelihood
        return Estimate(found.mean, found.covariance, found.log_mode_probability.exp(), told)

    return run


def deep(two: int, three: int) -> Callable[[Scenario, torch.Tensor], Estimate]:
    """As many modes back for a model of two modes, and for one of three."""

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
    """Average over runs and half of its interval."""
    return [round(float(values.mean()), 4), round(1.96 * float(values.std()) / math.sqrt(len(values)), 4)]


def distance(scenario: Scenario, x: torch.Tensor, found: Estimate) -> torch.Tensor:
    """NEES of position and velocity, divided by their number: the average of each run."""
    both = [*scenario.position, *scenario.velocity]
    error, P = (found.mean - x)[..., both], found.covariance[..., both, :][..., both]
    return (error * torch.linalg.solve(P, error.unsqueeze(-1)).squeeze(-1)).sum(-1).mean(-1) / len(both)


def judged(scenario: Scenario, x: torch.Tensor, found: Estimate) -> dict[str, list[float]]:
    """What is asked of every filter, each with its interval."""
    error = found.mean - x
    likeliest, true = found.probability.argmax(-1), scenario.modes
    switches = [t for t in range(1, len(true)) if true[t] != true[t - 1]]
    ends = [*switches[1:], len(true)]
    waits = []
    for begin, end in zip(switches, ends, strict=True):
        there = likeliest[:, begin:end] == true[begin]
        waits.append(torch.where(there.any(-1), there.int().argmax(-1), end - begin).to(F64))
    return {
        "position": interval(error[..., scenario.position].square().sum(-1).mean(-1).sqrt()),
        "velocity": interval(error[..., scenario.velocity].square().sum(-1).mean(-1).sqrt()),
        "nees": interval(distance(scenario, x, found)),
        "mode": interval((likeliest == true).to(F64).mean(-1)),
        "delay": interval(torch.stack(waits).mean(0)),
    }


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for scenario in (accelerating(), turning()):
        told, right = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        x, y = drawn(scenario, scenario.modes.expand(RUNS, -1), told)
        x_right, y_right = drawn(scenario, chained(scenario, RUNS, right), right)
        begin, likelihoods = len(found), {}
        for kind, alternatives in (("filter", FILTERS), ("smoother", SMOOTHERS)):
            for name, run in alternatives.items():
                start = time.perf_counter()
                with torch.no_grad():
                    row = judged(scenario, x, run(scenario, y))
                    of_chain = run(scenario, y_right)
                row["nees drawn"] = interval(distance(scenario, x_right, of_chain))
                likelihoods[name] = of_chain.log_likelihood
                found.append({"scenario": scenario.name, "kind": kind, "name": name, "runs": RUNS, **row})
                print(f"{time.perf_counter() - start:6.1f} s", found[-1], flush=True)
        for row in found[begin:]:
            if (of_row := likelihoods[row["name"]]) is not None and row["name"] != NEAREST:
                row["lost"] = interval(likelihoods[NEAREST] - of_row)
    return found


def picture(path: Path) -> None:
    """One run of the turns: where it was and what was seen, and how sure of its turns one is, before and after."""
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
        for label, found in (("filter", forward), ("smoother", back)):
            p = found.log_mode_probability[0, :, mode].exp()
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
