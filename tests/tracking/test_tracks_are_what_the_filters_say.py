"""Each row of a table is what the filter says of its target alone, whatever stands beside it in the file."""

import csv
import dataclasses
import math
from pathlib import Path
from unittest import mock

import pytest
import torch

from gradlogz import Prior, imm, report, track
from gradlogz.filters import SwitchingModel, constant_velocity, smooth
from gradlogz.reporting.tracks_wording import remarks
from gradlogz.special.proportions import share_of
from gradlogz.tracking import table_of, write_table
from gradlogz.tracking.noise_levels import DIFFUSE, LASTS
from gradlogz.tracking.target_batches import batches, discretized
from support.scales import close

RNG = 7
STEP = 0.5


def columns(lengths, *, dimensions=2, gaps=0.0, irregular=True, seed=RNG):
    """Targets that drift, interleaved."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows = []
    for who, length in enumerate(lengths):
        dt = STEP * (1 + (torch.rand(length, generator=g, dtype=torch.float64) if irregular else 0))
        t = (dt * torch.ones(length, dtype=torch.float64)).cumsum(0)
        p = 100 * normal(1, dimensions) + 3 * t[:, None] * normal(1, dimensions) + normal(length, dimensions)
        lost = torch.rand(length, dimensions, generator=g) < gaps
        p = p.masked_fill(lost, math.nan)
        rows += [(at, f"T{who}", *xs) for at, xs in zip(t.tolist(), p.tolist(), strict=True)]
    rows.sort(key=lambda row: row[0])
    return dict(
        zip(("time", "target", "x", "y", "z")[: 2 + dimensions], map(list, zip(*rows, strict=True)), strict=True)
    )


def extent(found):
    """Largest distance of two positions along a coordinate."""
    p = found.detections.position
    return float((p.nan_to_num(nan=-1e9).amax(0) - p.nan_to_num(nan=1e9).amin(0)).max())


def by_hand(found, who, method):
    """One target, one step after the other: the model of each step from the formulas of constant velocity."""
    at = [i for i, name in enumerate(table_of(found)["target"]) if name == who]
    d, levels = len(found.detections.axes), found.levels
    y = found.detections.position[at]
    t = found.detections.time[at]
    first = torch.stack([column[~column.isnan()][0] if bool((~column.isnan()).any()) else column[0] for column in y.T])
    first = first.nan_to_num()
    dt = t.diff(prepend=t[:1])
    mean, covariance = torch.zeros(2 * d, dtype=torch.float64), torch.zeros(2 * d, dtype=torch.float64)
    covariance[0::2] = (DIFFUSE * levels.sigma) ** 2
    covariance[1::2] = (2 * levels.speed) ** 2
    models = []
    for h in dt.tolist():
        if h == 0:
            continue
        numbers = {"dt": h, "observation_variance": levels.sigma**2, "dtype": torch.float64}
        models.append([constant_velocity(d, spectral_density=q, **numbers) for q in (levels.noise, levels.manoeuvre)])
    eye, zero = torch.eye(2 * d, dtype=torch.float64), torch.zeros(2 * d, 2 * d, dtype=torch.float64)
    F = torch.stack([torch.stack([eye, eye]), *(torch.stack([m.F for m in two]) for two in models)])
    Q = torch.stack([torch.stack([zero, zero]), *(torch.stack([m.Q for m in two]) for two in models)])
    H = torch.kron(torch.eye(d, dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)).expand(2, -1, -1)
    R = levels.sigma**2 * torch.eye(d, dtype=torch.float64).expand(2, -1, -1)
    leave, back = 1 / (LASTS * levels.step), 2 / (LASTS * levels.step)
    rate = torch.tensor([[-leave, leave], [back, -back]], dtype=torch.float64)
    transition = torch.linalg.matrix_exp(rate * dt[:, None, None])
    model = SwitchingModel(transition, F, Q, H, R)
    belief = Prior(mean, covariance.diag(), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log())
    result = (imm if method == "imm" else smooth)(
        model, y - first, belief, **({"method": "imm"} if method != "imm" else {})
    )
    return at, first, result


@pytest.mark.parametrize("dimensions", [2, 3])
def test_every_target_is_filtered_as_if_it_were_alone(dimensions):
    given = columns([3, 40, 7, 1, 19], dimensions=dimensions, gaps=0.2)
    found = track(given, sigma=1.0, noise=0.1)
    d = dimensions
    for who in ("T0", "T1", "T2", "T4"):
        at, first, alone = by_hand(found, who, "imm")
        seen = (~found.detections.position[at].isnan()).cumsum(0)
        scale = extent(found)
        expected = torch.cat((alone.mean[:, 0::2] + first, alone.mean[:, 1::2]), -1)
        known = torch.cat((seen >= 1, seen >= 2), -1)
        assert torch.equal(found.filtered.mean[at].isnan(), ~known)
        close(found.filtered.mean[at][known], expected[known], scale=scale)
        places = [*range(0, 2 * d, 2), *range(1, 2 * d, 2)]
        close(found.filtered.covariance[at], alone.covariance[:, places][:, :, places], scale=scale**2)
        close(found.filtered.probability[at], alone.log_mode_probability.exp(), scale=100.0)


def test_smoothed_rows_are_those_of_each_target_alone():
    found = track(columns([12, 30], gaps=0.1), sigma=1.0, noise=0.1, smooth=True)
    for who in ("T0", "T1"):
        at, first, alone = by_hand(found, who, "smooth")
        expected = torch.cat((alone.mean[:, 0::2] + first, alone.mean[:, 1::2]), -1)
        close(found.smoothed.mean[at], expected, scale=1e4 * extent(found))  # from beliefs 1e3 sigmas wide
        close(found.smoothed.probability[at], alone.log_mode_probability.exp(), scale=1e4)


def test_smoothed_positions_that_leave_their_detections_are_named():
    tracks = track(columns((30, 25, 40), gaps=0.1), sigma=1.0, smooth=True)
    assert tracks.poorly_smoothed == []
    assert track(columns((30, 25)), sigma=1.0).poorly_smoothed == []
    mean = tracks.smoothed.mean.clone()
    mean[tracks.detections.target == tracks.detections.names.index("T1"), 0] += 1e3
    wrong = dataclasses.replace(tracks, smoothed=tracks.smoothed._replace(mean=mean))
    assert wrong.poorly_smoothed == ["T1"]
    assert any("T1" in sentence and "filtered" in sentence for sentence in remarks(wrong))
    assert not any("farther" in sentence for sentence in remarks(tracks))


def test_innovations_are_compared_with_what_was_expected():
    """The definition, one row at a time; the first detection of a coordinate is compared with nothing."""
    found = track(columns([25], gaps=0.3), sigma=1.0, noise=0.1)
    _, _, alone = by_hand(found, "T0", "imm")
    y = found.detections.position
    count = (~y.isnan()).cumsum(0)
    for i in range(25):
        there = [j for j in range(2) if not math.isnan(y[i, j]) and count[i, j] > 1]
        assert found.degrees[i] == len(there)
        if not there:
            assert math.isnan(found.nis[i])
            continue
        v, S = alone.mode_innovation[i][:, there], alone.mode_innovation_covariance[i][:, there][..., there]
        weights, z = alone.predicted_log_mode_probability[i].exp(), []
        for j in range(len(there)):  # each coordinate given the one before it, mode by mode
            gain = S[:, j, :j] / S[:, 0, 0].unsqueeze(-1)
            mean, variance = (gain * v[:, :j]).sum(-1), S[:, j, j] - (gain * S[:, j, :j]).sum(-1)
            normal = torch.distributions.Normal(mean, variance.sqrt())
            z.append(torch.special.ndtri((weights * normal.cdf(v[:, j])).sum() / weights.sum()))
            weights = weights * normal.log_prob(v[:, j]).exp()
        close(found.nis[i], torch.stack(z).square().sum(), scale=1e3)


def test_steps_that_occur_often_are_made_once_and_are_the_same():
    model = track(columns([5]), sigma=1.0, noise=0.1).model
    dt = torch.tensor([[0.0, 0.5, 0.5, 2.0], [0.0, 2.0, 0.5, 0.5]], dtype=torch.float64)
    few = discretized(model, dt)
    for h, place in ((0.5, (0, 1)), (2.0, (1, 1)), (0.0, (0, 0))):
        F = torch.linalg.matrix_exp(h * model.F)
        close(few.F[place], F, scale=10.0)
        close(few.transition[place], torch.linalg.matrix_exp(h * model.transition.rate), scale=10.0)
        x = torch.tensor([[h**3 / 3, h**2 / 2], [h**2 / 2, h]], dtype=torch.float64)
        close(few.Q[place][0], torch.kron(torch.eye(2, dtype=torch.float64), 0.1 * x), scale=10.0)


def test_batches_hold_every_row_once_and_pad_no_target_to_more_than_twice_its_length():
    found = track(columns([1, 2, 3, 40, 41, 80, 5]), sigma=1.0, noise=0.1).detections
    rows = []
    for batch in batches(found, most=100):
        lengths = batch.inside.sum(-1)
        assert int(lengths.max()) <= 2 * int(lengths.min())
        assert batch.rows.numel() <= max(100, int(lengths.max()))
        rows += batch.rows[batch.inside].tolist()
    assert sorted(rows) == list(range(172))


@pytest.mark.parametrize("name", ["gpb1", "gpb2", "imm"])
@pytest.mark.parametrize("model", ["cv", "cv-ca", "turn"])
def test_every_filter_follows_straight_lines_in_every_model(name, model):
    g = torch.Generator().manual_seed(0)
    t = torch.arange(40.0, dtype=torch.float64)
    noise = 0.1 * torch.randn(40, 2, generator=g, dtype=torch.float64)
    found = track({"time": t, "x": 2 * t + noise[:, 0], "y": 5 - t + noise[:, 1]}, filter=name, model=model)
    assert found.filtered.probability.sum(-1).sub(1).abs().max() < 1e-12
    assert (found.filtered.mean[-1] - torch.tensor([78.0, -34.0, 2.0, -1.0], dtype=torch.float64)).abs().max() < 0.3


def test_one_detection_of_a_target_has_a_position_and_no_speed():
    found = track({"time": [1.0, 2.0], "target": ["a", "b"], "x": [3.0, 4.0], "y": [5.0, None]})
    assert found.filtered.mean[0, :2].tolist() == [3.0, 5.0]
    assert found.filtered.mean[1, 0] == 4.0
    assert bool(found.filtered.mean[1, 1].isnan())
    assert bool(found.filtered.mean[:, 2:].isnan().all())
    assert bool(found.nis.isnan().all())
    assert found.consistency.total == 0
    assert "no innovations" in report(found)


def test_levels_are_found_within_a_factor():
    """Velocities that diffuse with density 4, seen with deviation 10 every 2 s."""
    g = torch.Generator().manual_seed(3)
    n, steps, h, q, sigma = 25, 80, 2.0, 4.0, 10.0
    model = constant_velocity(2, dt=h, spectral_density=q, observation_variance=sigma**2, dtype=torch.float64)
    L = torch.linalg.cholesky(model.Q)
    x, rows = torch.zeros(n, 4, dtype=torch.float64), []
    for i in range(steps):
        x = x @ model.F.T + torch.randn(n, 4, generator=g, dtype=torch.float64) @ L.T
        y = x[:, [0, 2]] + sigma * torch.randn(n, 2, generator=g, dtype=torch.float64)
        rows += [(h * i, who, *xy) for who, xy in enumerate(y.tolist())]
    given = dict(zip(("time", "target", "x", "y"), map(list, zip(*rows, strict=True)), strict=True))
    found = track(given)
    assert abs(found.levels.sigma / sigma - 1) < 0.15
    assert 1 / 2 < found.levels.noise / q < 2
    assert abs(found.consistency.value - 0.95) < 0.02
    learned = track(given, fit=True)
    assert learned.converged
    assert learned.evaluations > 10
    assert abs(learned.levels.sigma / sigma - 1) < 0.1
    assert learned.log_likelihood > found.log_likelihood


def test_the_interval_of_a_share_solves_wilsons_equation():
    for number, total in ((0, 5), (3, 10), (190, 200), (7, 7)):
        share = share_of(number, total)
        for end in (share.low, share.high):
            close(
                torch.tensor((number / total - end) ** 2),
                torch.tensor(1.959963984540054**2 * end * (1 - end) / total),
                scale=10.0,
            )


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_table_has_the_rows_of_the_input_in_their_order(tmp_path, suffix):
    polars = pytest.importorskip("polars")
    given = columns([9, 4], gaps=0.2)
    found = track(given, smooth=True)
    path = write_table(found, tmp_path / f"table{suffix}")
    frame = (polars.read_csv if suffix == ".csv" else polars.read_parquet)(path)
    assert frame["time"].to_list() == given["time"]
    assert frame["target"].to_list() == given["target"]
    assert frame["x"].to_list() == [None if math.isnan(x) else x for x in given["x"]]
    assert frame["vx_filtered"].null_count() == int(found.filtered.mean[:, 2].isnan().sum()) > 0
    total = frame["probability_quiet"] + frame["probability_manoeuvring"]
    assert (total - 1).abs().max() < 1e-12
    assert set(frame["inside"].drop_nulls().to_list()) <= {0.0, 1.0}


def test_a_table_without_polars_is_the_same(tmp_path, monkeypatch):
    from gradlogz.tracking import table

    found = track(columns([9, 4], gaps=0.2))
    write_table(found, tmp_path / "with.csv")
    monkeypatch.setattr(table, "_polars", lambda: None)
    write_table(found, tmp_path / "without.csv")

    def read(name):
        with (tmp_path / name).open(newline="") as file:
            head, *rows = csv.reader(file)
        return head, [[float(c) if c and i != 1 else c for i, c in enumerate(row)] for row in rows]

    assert read("with.csv") == read("without.csv")


def test_the_scenario_is_followed_better_than_it_is_seen():
    found = track(smooth=True)
    assert found.errors["smoothed position"] < found.errors["filtered position"] < found.errors["error of detections"]
    assert 0.5 < found.errors["filtered NEES"] < 1.5
    assert abs(found.consistency.value - 0.95) < 0.05
    straight = found.best.probability[:, 0] > 0.5
    assert 0.6 < straight.double().mean() < 0.85  # 140 of 200 s


def test_the_scenario_is_the_derivative_of_its_positions():
    from gradlogz.tracking.scenario import LEGS, SPEED, flown

    t = torch.linspace(1, sum(length for length, _ in LEGS) - 1, 500, dtype=torch.float64)
    h = 1e-4
    speed = (flown(t + h, 0.3, 1) - flown(t - h, 0.3, 1))[:, :2] / (2 * h)
    truth = flown(t, 0.3, 1)[:, 2:]
    assert (speed - truth).abs().max() < 1e-3 * SPEED
    close(truth.norm(dim=-1), torch.full((500,), SPEED, dtype=torch.float64), scale=SPEED)


# Outliers -------------------------------------------------------------------------------------------------------------


def flights(outliers, seed=0):
    """Eight targets on straight paths, 60 detections each of deviation 1; outliers at these rows of each target."""
    g = torch.Generator().manual_seed(seed)
    rows, truth = [], []
    for who in range(8):
        path = 100 * torch.randn(1, 2, generator=g) + torch.arange(60.0)[:, None] * torch.randn(1, 2, generator=g)
        noise = torch.randn(60, 2, generator=g)
        noise[outliers] += 300 * torch.nn.functional.normalize(torch.randn(len(outliers), 2, generator=g), dim=-1)
        rows += [(float(t), f"T{who}", *p) for t, p in enumerate((path + noise).double().tolist())]
        truth.append(path)
    return dict(zip(("time", "target", "x", "y"), map(list, zip(*rows, strict=True)), strict=True)), torch.cat(truth)


@pytest.mark.parametrize("outliers", [[], [30], [0], [59], [0, 59], [10, 11, 30, 50]])
@pytest.mark.parametrize("model", ["cv", "turn"])
def test_outliers_are_rejected_wherever_they_are_and_nothing_else_is(outliers, model):
    rows, truth = flights(outliers)
    found = track(rows, model=model, smooth=True)
    expected = torch.zeros(8, 60, dtype=torch.bool)
    expected[:, outliers] = True
    assert torch.equal(found.detections.outlying, expected.flatten())
    assert torch.equal(table_of(found)["outlier"], expected.flatten().double())
    assert table_of(found)["x"].tolist() == rows["x"]  # as in the input
    error = (found.smoothed.mean[:, :2] - truth).square().sum(-1).nanmean().sqrt()
    assert float(error) < 1.0  # less than that of a single detection, 1.41
    hidden = {**rows, **{a: [None if o else v for v, o in zip(rows[a], expected.flatten(), strict=True)] for a in "xy"}}
    levels = {"sigma": found.levels.sigma, "noise": found.levels.noise, "outliers": 0}
    alone = track(hidden, model=model, **levels)  # as if the outliers had never been detected
    assert torch.equal(found.filtered.mean.isnan(), alone.filtered.mean.isnan())
    assert torch.equal(found.nis.isnan(), alone.nis.isnan())
    scale = extent(found)
    close(found.filtered.mean.nan_to_num(), alone.filtered.mean.nan_to_num(), scale=scale)
    close(found.filtered.covariance, alone.filtered.covariance, scale=scale**2)
    close(found.filtered.probability, alone.filtered.probability, scale=100.0)
    close(found.nis.nan_to_num(), alone.nis.nan_to_num(), scale=1e3)


def test_no_detection_is_rejected_if_it_is_not_wanted_or_if_there_would_be_many():
    rows, _ = flights([20])
    assert int(track(rows, outliers=0).detections.outlying.sum()) == 0
    jumps, _ = flights(list(range(1, 60, 2)))  # every other row
    assert int(track(jumps, sigma=1.0, noise=1e-3).detections.outlying.sum()) == 0


@pytest.mark.parametrize(
    ("outliers", "rows", "none"), [(17, 60, False), (18, 60, True), (19, 60, True), (1, 3, False), (2, 6, True)]
)
def test_the_share_of_outliers_from_which_on_none_is_rejected_is_the_one_that_is_documented(outliers, rows, none):
    from gradlogz.tracking import outliers as module

    marked = torch.arange(rows).unsqueeze(0) < outliers
    with mock.patch.object(module, "_both_directions", return_value=marked):
        found = track({"time": list(range(rows)), "x": list(range(rows)), "y": [0.0] * rows}, sigma=1.0, noise=1.0)
    assert int(found.detections.outlying.sum()) == (0 if none else outliers)
    rule = f"two or more, and at least {100 * module.MANY:.0f} %"
    assert rule in " ".join((Path(__file__).parents[2] / "docs" / "track.md").read_text().split())
    assert rule in " ".join(report(found).split())


def test_a_fit_is_that_of_the_other_detections():
    rows, _ = flights([5, 33])
    clean, _ = flights([])
    one, other = (track(each, fit=True).levels for each in (rows, clean))
    assert one.sigma == pytest.approx(other.sigma, rel=0.05)
    assert 0.9 < one.sigma < 1.1


def test_outliers_that_were_not_rejected_do_not_spoil_a_fit():
    """None is rejected, as where a target has many: the fit expects them all the same, unless outliers=0."""
    from gradlogz.tracking import run_tracking as module

    rows, _ = flights([5, 20, 33, 50])
    with mock.patch.object(module, "_without_outliers", side_effect=lambda detections, *_: detections):
        robust, spoiled = (track(rows, fit=True, **options).levels for options in ({"outliers": 0.05}, {"outliers": 0}))
    assert 0.9 < robust.sigma < 1.1
    assert robust.noise < 1e-3  # straight paths
    assert spoiled.sigma > 2 or spoiled.noise > 1e-2 or spoiled.manoeuvre > 100 * robust.manoeuvre


def test_a_row_that_declares_its_noise_is_judged_by_it():
    """Every tenth row has a deviation of 100 and says so; an outlier of 50 000 among them is still one."""
    g = torch.Generator().manual_seed(4)
    t = torch.arange(200, dtype=torch.float64)
    sigma = torch.where(t % 10 == 3, 100.0, 1.0)
    noise = sigma * torch.randn(2, 200, generator=g, dtype=torch.float64)
    rows = {"time": t.tolist(), "x": (2 * t + noise[0]).tolist(), "y": (t + noise[1]).tolist(), "sigma": sigma.tolist()}
    assert int(track(rows).detections.outlying.sum()) == 0
    assert int(track(rows, noise=1e-3).detections.outlying.sum()) == 0
    wide = {**rows, "sigma": [1e9 if s == 100.0 else s for s in rows["sigma"]]}  # says nothing, and is no outlier
    assert int(track(wide, noise=1e-3).detections.outlying.sum()) == 0
    wrong = {**rows, "x": [5e4 if i == 77 else x for i, x in enumerate(rows["x"])]}
    assert track(wrong, noise=1e-3).detections.outlying.nonzero().flatten().tolist() == [77]
    one = track({**rows, "sigma": [1.0] * 200}, sigma=sigma.square().mean().sqrt(), noise=1e-3)  # replaces the column
    other = track({name: rows[name] for name in ("time", "x", "y")}, sigma=sigma.square().mean().sqrt(), noise=1e-3)
    assert torch.equal(one.detections.outlying, other.detections.outlying)
    assert torch.equal(one.filtered.mean.nan_to_num(), other.filtered.mean.nan_to_num())


def test_the_extent_of_a_very_long_target_is_found():
    from gradlogz.tracking.outliers import FAR, _extent

    y = torch.tensor([-3.0, 3.0], dtype=torch.float64).expand(1, (1 << 23) + 1, 2)  # more than torch's quantile takes
    assert _extent(y).tolist() == [FAR * 3.0]
