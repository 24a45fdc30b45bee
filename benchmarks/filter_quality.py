"""How good the switching filters and smoothers are, on two manoeuvres, beside filterpy's IMM and nearly exact ones.

python benchmarks/filter_quality.py             100 runs of each, a few minutes; results/filter_quality.json
python benchmarks/filter_quality.py smoother    only rows of that kind, in place of those that are there; or filter
python benchmarks/filter_quality.py picture     one run of the turns, drawn to docs/pictures/smoothing.svg

Errors are of position and velocity. NEES is of both together, divided by their number: 1 is what a filter should have,
more is too sure. A mode is right where the likeliest one is the true one. The delay of a switch is how many steps pass
until the new mode is the likeliest for the first time, the length of its stay if it never is. Runs are independent:
intervals are 1.96 standard errors of their averages.
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

from gradlogz import (
    SwitchingModel,
    constant_acceleration,
    constant_velocity,
    coordinated_turn,
    exact,
    gpb,
    gpb1,
    gpb2,
    imm,
    rao_blackwell,
    smooth,
)

ROOT = Path(__file__).parents[1]
RUNS, KEEP = 100, 100
F64 = torch.float64


class Scenario(NamedTuple):
    """A model, how it begins, and the true mode of every step."""

    name: str
    model: SwitchingModel
    start: dict[str, torch.Tensor]
    modes: torch.Tensor  # [t]
    position: tuple[int, int]
    velocity: tuple[int, int]


class Estimate(NamedTuple):
    mean: torch.Tensor  # [runs, t, s]
    covariance: torch.Tensor
    probability: torch.Tensor  # [runs, t, k]


def accelerating() -> Scenario:
    """The demonstration of ekfukf: constant velocity, and acceleration at steps 51-70 and 121-150.   [hartikainen11]"""
    options: dict[str, Any] = {"dt": 0.1, "observation_variance": 0.1, "dtype": F64}
    slow = constant_velocity(2, spectral_density=0.01, derivatives=3, **options)
    fast = constant_acceleration(2, spectral_density=1.0, **options)
    chain = torch.tensor([[0.98, 0.02], [0.02, 0.98]], dtype=F64)
    modes = torch.zeros(200, dtype=torch.long)
    modes[50:70] = modes[120:150] = 1
    start = {
        "mean": torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, 0.0], dtype=F64),
        "covariance": torch.diag(torch.tensor([0.1, 0.1, 0.5, 0.1, 0.1, 0.5], dtype=F64)),
        "log_mode_probability": torch.tensor([0.9, 0.1], dtype=F64).log(),
    }
    model = SwitchingModel.of([slow, fast], transition=chain)
    return Scenario("velocity and acceleration", model, start, modes, (0, 3), (1, 4))


def turning() -> Scenario:
    """Straight, a left turn, straight, a right turn, straight: 120 s at about 15 m/s, seen within 5 m every second."""
    options: dict[str, Any] = {"dt": 1.0, "spectral_density": 0.1, "observation_variance": 25.0, "dtype": F64}
    left, right = (coordinated_turn(2, rate=rate, **options) for rate in (0.15, -0.15))
    chain = torch.tensor([[0.94, 0.03, 0.03], [0.05, 0.95, 0.0], [0.05, 0.0, 0.95]], dtype=F64)
    modes = torch.zeros(120, dtype=torch.long)
    modes[30:50], modes[75:95] = 1, 2
    start = {
        "mean": torch.tensor([0.0, 15.0, 0.0, 0.0], dtype=F64),
        "covariance": torch.diag(torch.tensor([25.0, 4.0, 25.0, 4.0], dtype=F64)),
        "log_mode_probability": torch.tensor([0.9, 0.05, 0.05], dtype=F64).log(),
    }
    model = SwitchingModel.of([constant_velocity(2, **options), left, right], transition=chain)
    return Scenario("coordinated turns", model, start, modes, (0, 2), (1, 3))


def drawn(scenario: Scenario, runs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """States and observations of the given modes: noise of the model, and a beginning as it is believed."""
    model, generator = scenario.model, torch.Generator().manual_seed(seed)

    def noise(covariance: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt()
        return torch.randn(runs, len(root), dtype=F64, generator=generator) @ root.mT

    x, states, seen = scenario.start["mean"] + noise(scenario.start["covariance"]), [], []
    for j in scenario.modes.tolist():
        x = x @ model.F[j].mT + noise(model.Q[j])
        states.append(x)
        seen.append(x @ model.H[j].mT + noise(model.R[j]))
    return torch.stack(states, 1), torch.stack(seen, 1)


def of_filterpy(scenario: Scenario, y: torch.Tensor) -> Estimate:
    """filterpy's IMMEstimator, run after run."""
    model, parts = scenario.model, ([], [], [])
    for series in y.numpy():
        bank = []
        for j in range(model.modes):
            kalman = KalmanFilter(dim_x=model.state_size, dim_z=model.observation_size)
            kalman.x, kalman.P = scenario.start["mean"].numpy().copy(), scenario.start["covariance"].numpy().copy()
            kalman.F, kalman.Q, kalman.H, kalman.R = (getattr(model, n)[j].numpy() for n in "FQHR")
            bank.append(kalman)
        begins = scenario.start["log_mode_probability"].exp().numpy()
        other, rows = IMMEstimator(bank, begins, model.transition.numpy()), ([], [], [])
        for z in series:
            other.predict()
            other.update(z)
            for row, value in zip(rows, (other.x, other.P, other.mu), strict=True):
                row.append(np.array(value))
        for part, row in zip(parts, rows, strict=True):
            part.append(np.stack(row))
    return Estimate(*(torch.from_numpy(np.stack(part)) for part in parts))


def ours(filter: Callable[..., Any], **options: Any) -> Callable[[Scenario, torch.Tensor], Estimate]:
    def run(scenario: Scenario, y: torch.Tensor) -> Estimate:
        found = filter(scenario.model, y, **scenario.start, **options)
        found = getattr(found, "filtered", found) if filter is not smooth else found
        return Estimate(found.mean, found.covariance, found.log_mode_probability.exp())

    return run


def deep(scenario: Scenario, y: torch.Tensor) -> Estimate:
    """As many modes back as fit in about a hundred Gaussians: the nearest to the exact filter that is run here."""
    return ours(gpb, depth=8 if scenario.model.modes == 2 else 5)(scenario, y)


FILTERS = {
    "filterpy, IMM": of_filterpy,
    "imm": ours(imm),
    "gpb1": ours(gpb1),
    "gpb2": ours(gpb2),
    "gpb, 128 Gaussians or 81": deep,
    f"exact, {KEEP} histories": ours(exact, keep=KEEP),
    f"rao_blackwell, {KEEP} particles": ours(rao_blackwell, particles=KEEP, generator=torch.Generator().manual_seed(0)),
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


def judged(scenario: Scenario, x: torch.Tensor, found: Estimate) -> dict[str, list[float]]:
    """What is asked of every filter, each with its interval."""
    error = found.mean - x
    both = [*scenario.position, *scenario.velocity]
    P = found.covariance[..., both, :][..., both]
    distance = (error[..., both] * torch.linalg.solve(P, error[..., both].unsqueeze(-1)).squeeze(-1)).sum(-1)
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
        "nees": interval(distance.mean(-1) / len(both)),
        "mode": interval((likeliest == true).to(F64).mean(-1)),
        "delay": interval(torch.stack(waits).mean(0)),
    }


def rows(kinds: list[str], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for scenario in (accelerating(), turning()):
        x, y = drawn(scenario, RUNS)
        for kind, alternatives in (("filter", FILTERS), ("smoother", SMOOTHERS)):
            if kind not in kinds:
                found += [row for row in known if (row["scenario"], row["kind"]) == (scenario.name, kind)]
                continue
            for name, run in alternatives.items():
                begin = time.perf_counter()
                with torch.no_grad():
                    row = judged(scenario, x, run(scenario, y))
                found.append({"scenario": scenario.name, "kind": kind, "name": name, "runs": RUNS, **row})
                print(f"{time.perf_counter() - begin:6.1f} s", found[-1], flush=True)
    return found


def picture(path: Path) -> None:
    """One run of the turns: where it was and what was seen, and how sure of its turns one is, before and after."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "gradlogz", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    scenario = turning()
    x, y = (part[:1] for part in drawn(scenario, RUNS))
    back = smooth(scenario.model, y, **scenario.start, method="gpb2")
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


def main(kinds: list[str]) -> None:
    path = ROOT / "benchmarks" / "results" / "filter_quality.json"
    known = json.loads(path.read_text())["rows"] if kinds else []
    versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    table = {"benchmark": "filter_quality", **versions, "rows": rows(kinds or ["filter", "smoother"], known)}
    path.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["picture"]:
        picture(ROOT / "docs" / "pictures" / "smoothing.svg")
    else:
        main(sys.argv[1:])
