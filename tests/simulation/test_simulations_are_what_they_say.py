"""simulate and sweep run evolve as it is, from the laws they name, and draw theory's curves where theory has them."""

import math

import pytest
import torch
from scipy import stats

from gradlogz import Ascent, evolve, simulate, sweep
from gradlogz.dynamics import hermite_growth, sphere_growth
from gradlogz.reporting.simulation_page import page_of
from gradlogz.reporting.simulation_wording import agreement, verdict_sentence
from gradlogz.simulation import theory_curves as curves
from gradlogz.simulation.grid import grid_text, parse_grid, ranges_of
from gradlogz.simulation.initial_clouds import SAMPLERS, ascent_of, starts
from gradlogz.simulation.settings import INITIAL, SimulationSettings
from gradlogz.simulation.theory_boundaries import boundaries, overshoot
from support.scales import close

LAWS = {
    "gaussian": stats.norm(),
    "uniform": stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
    "laplace": stats.laplace(scale=1 / math.sqrt(2)),
    "exponential": stats.expon(loc=-1),
}
RMS = {"tokens": 300, "beta": 0.1, "contraction": "rms_norm"}


@pytest.mark.parametrize("name", LAWS)
def test_a_start_has_its_law(name):
    cloud = starts(SimulationSettings(tokens=4000, dim=2, initial=name, seeds=1))[0]
    assert stats.kstest(cloud.flatten().numpy(), LAWS[name].cdf).pvalue > 1e-3
    assert LAWS[name].mean() == pytest.approx(0, abs=1e-12)
    assert LAWS[name].var() == pytest.approx(1)


def test_starts_on_spheres_have_their_radius_and_no_direction():
    for contraction, radius in (("sphere", 1.0), ("rms_norm", math.sqrt(5)), ("zca", math.sqrt(5))):
        cloud = starts(SimulationSettings(tokens=4000, dim=5, initial="sphere", contraction=contraction, seeds=1))[0]
        close(cloud.norm(dim=-1), torch.full((4000,), radius, dtype=torch.float64))
        assert float(cloud.mean(0).norm()) < 0.1 * radius
    circle = starts(SimulationSettings(tokens=4000, dim=3, initial="circle", seeds=1))[0]
    close(circle[:, :2].norm(dim=-1), torch.ones(4000, dtype=torch.float64))
    assert stats.kstest(torch.atan2(circle[:, 1], circle[:, 0]).numpy() / (2 * math.pi) + 0.5, "uniform").pvalue > 1e-3


def test_the_looks_are_those_of_one_run():
    """In parts, with looks between them, a cloud goes where it goes in one."""
    found = simulate(dim=2, beta=1.0, tokens=60, steps=77, seeds=2)
    cloud = starts(found.settings)
    whole = evolve(cloud, Ascent(tau=0.5, beta=1.0), contraction="zca", steps=77, observe=["entropy", "displacement"])
    assert torch.equal(found.trajectory.cloud, whole.cloud)
    times = found.trajectory.times
    assert times.tolist() == [*range(33), *range(34, 65, 2), 68, 72, 76, 77]
    for name in ("entropy", "displacement"):
        seen = found.trajectory.observed[name]
        torch.testing.assert_close(seen, whole.observed[name][times], equal_nan=True, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.frames[-1], whole.cloud[0])


@pytest.mark.parametrize(
    ("steps", "every", "times"), [(20, 7, [0, 7, 14, 20]), (21, 7, [0, 7, 14, 21]), (5, 7, [0, 5])]
)
def test_every_step_is_made_whatever_the_recording_interval(steps, every, times):
    found = simulate(dim=2, beta=1.0, tokens=60, steps=steps, every=every, seeds=1).trajectory
    cloud = starts(SimulationSettings(dim=2, tokens=60, seeds=1))
    whole = evolve(cloud, Ascent(tau=0.5, beta=1.0), contraction="zca", steps=steps)
    assert (found.times.tolist(), found.step) == (times, steps)
    torch.testing.assert_close(found.cloud, whole.cloud, rtol=1e-12, atol=1e-12)


def test_heads_share_the_coordinates():
    s = SimulationSettings(dim=4, heads=2, beta=0.7, tau=0.3, contraction="none", steps=1, tokens=30, seeds=1)
    x = starts(s)[0]
    expected = x.clone()
    for part in (slice(0, 2), slice(2, 4)):
        expected[:, part] += 0.3 * (0.7 * x[:, part] @ x[:, part].mT).softmax(-1) @ x[:, part]
    close(evolve(x, ascent_of(s), steps=1).cloud, expected, scale=10.0)


def test_a_cloud_of_ones_own_is_taken_as_it_is():
    cloud = torch.randn(2, 50, 3, dtype=torch.float64)
    found = simulate(cloud, steps=4, contraction="rms_norm")
    assert torch.equal(found.start, cloud)
    assert (found.settings.seeds, found.settings.tokens, found.settings.dim) == (2, 50, 3)
    assert agreement(found)[0] == "silent"
    assert "custom initial cloud" in page_of(found).subtitle
    assert found.command == "gradlogz.simulate(cloud, contraction='rms_norm', steps=4)"


def test_expectations_belong_to_the_settings_of_the_preset():
    assert simulate("blow-up", seeds=1, tokens=200).preset is not None
    assert simulate("blow-up", seeds=1, beta=0.4, steps=2).preset is None


def test_the_command_makes_the_same_again():
    found = simulate("hopfield", seeds=1, steps=3, seed=5, residual=False)
    expected = "--tokens 300 --beta 4 --contraction shrinkage --initial sphere --steps 3 --no-residual --keys 6"
    assert found.command == f"gradlogz simulate {expected} --seeds 1 --seed 5"
    assert simulate("hopfield", seeds=1).command == "gradlogz simulate hopfield --seeds 1"


# Measures of keys, matrices, draws ------------------------------------------------------------------------------------


def test_a_measure_of_keys_and_matrices_reach_the_step():
    text = {
        "key_mean": "1,-0.5",
        "key_covariance": "2,0.6/0.6,0.5",
        "qk_matrix": "1,0.3/-0.2,0.8",
        "ov_matrix": "0.5,2",
    }
    found = simulate(
        dim=2, tokens=30, seeds=1, beta=0.4, tau=0.3, contraction="none", key_measure="gaussian", steps=1, **text
    )
    mu, Sigma = (torch.tensor(t, dtype=torch.float64) for t in ([1.0, -0.5], [[2.0, 0.6], [0.6, 0.5]]))
    B, W = (torch.tensor(t, dtype=torch.float64) for t in ([[1.0, 0.3], [-0.2, 0.8]], [[0.5, 0.0], [0.0, 2.0]]))
    x = found.start[0]
    close(found.trajectory.cloud[0], x + 0.3 * (mu + 0.4 * x @ B @ Sigma) @ W.mT, scale=10.0)
    assert "mean 1,-0.5" in str(page_of(found).sections[-1].parts[-1])
    options = "--key-measure gaussian --key-mean 1,-0.5 --key-covariance 2,0.6/0.6,0.5 --qk-matrix 1,0.3/-0.2,0.8"
    assert f"{options} --ov-matrix 0.5,2" in found.command


def test_numbers_and_tensors_are_the_same_as_their_text():
    options = {"dim": 2, "tokens": 30, "seeds": 1, "steps": 2, "contraction": "none", "key_measure": "gaussian"}
    names = ("key_mean", "key_covariance", "qk_matrix", "ov_matrix")
    third = torch.tensor([[1 / 3, 0.0], [0.25, 1.0]], dtype=torch.float64)
    for text, values in (
        (("0.5", "2", "1", "0.1"), (0.5, 2.0, 1.0, 0.1)),
        (("1,-0.5", "2,0.5", "2,3", "qk"), ([1.0, -0.5], (2.0, 0.5), torch.tensor([2, 3]), "qk")),
        (("0", "2,0.5/0.5,1", f"{1 / 3!r},0/0.25,1", "1e-20"), (0.0, [[2, 0.5], [0.5, 1]], third, 1e-20)),
    ):
        expected = simulate(**options, **dict(zip(names, text, strict=True)))
        found = simulate(**options, **dict(zip(names, values, strict=True)))
        assert found.settings == expected.settings
        assert torch.equal(found.trajectory.cloud, expected.trajectory.cloud)
    phases = sweep({"tau": [0.1, 0.2]}, engine="process", **{**options, "key_mean": 0.5})
    assert phases.settings.key_mean == "0.5"


def test_keys_on_a_sphere_have_the_radius_of_the_tokens():
    for contraction, radius in (("sphere", 1.0), ("rms_norm", math.sqrt(3))):
        s = SimulationSettings(dim=3, contraction=contraction, key_measure="sphere", initial="sphere")
        assert float(ascent_of(s).keys.radius) == pytest.approx(radius)
    found = simulate(dim=3, key_measure="sphere", contraction="sphere", initial="sphere", tokens=50, seeds=1, steps=20)
    close(found.trajectory.cloud, found.start, scale=10.0)  # attention is parallel to the query: a fixed point


@pytest.mark.parametrize("contraction", ["none", "zca", "scalar", "recoloring", "inverse_step"])
def test_moments_on_gaussian_keys_are_exact_for_every_cloud(contraction):
    options = {"key_measure": "gaussian", "key_mean": "0.3,-0.1", "key_covariance": "1,0.2/0.2,0.5"}
    found = simulate(
        dim=2, tokens=40, seeds=1, beta=0.4, tau=0.1, initial="exponential", contraction=contraction, steps=8, **options
    )
    for name, curve in curves.moments(found).items():
        assert curve.formula == "exact"
        assert curve.values == pytest.approx(found.trajectory.observed[name][:, 0].tolist(), rel=1e-9, abs=1e-9)


def test_draws_are_those_of_the_seed():
    options = {"dim": 2, "tokens": 30, "steps": 3, "contraction": "none", "draws": 2, "seeds": 2}
    one, two, other = (simulate(**options, seed=seed).trajectory.cloud for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one[1:], other[:1])


def test_theory_of_identity_weights_is_silent_about_others():
    for options in ({"qk_matrix": "0.5"}, {"natural": True}, {"draws": 1}, {"key_measure": "gaussian"}):
        found = simulate(dim=2, tokens=30, seeds=1, steps=1, **options)
        assert not found.settings.plain
        assert curves.growth(found) is None
        assert curves.weights(found) == {}
        assert not curves.rising(found)


# Theory's curves ------------------------------------------------------------------------------------------------------


def test_moments_without_contraction_are_those_of_riccati():
    """Small steps: C(t)^-1 = C(0)^-1 - 2 beta t, to first order in tau."""
    cloud = torch.randn(50, 2, dtype=torch.float64)
    cloud = cloud - cloud.mean(0)
    found = simulate(cloud, beta=0.5, tau=0.0025, contraction="none", steps=200, every=100)
    curve = curves.moments(found)["radius"].values
    C = torch.cov(cloud.mT, correction=0)
    at = torch.linalg.inv(torch.linalg.inv(C) - 2 * 0.5 * 0.5 * torch.eye(2, dtype=torch.float64))
    assert curve[-1] == pytest.approx(math.sqrt(float(at.trace())), rel=0.01)
    assert curve[0] == pytest.approx(math.sqrt(float(C.trace())), rel=1e-12)


def test_the_unstable_mode_grows_as_theory_says():
    """Both start from the sampling noise of the same cloud, and the mode is still small."""
    for name, options in (("whitening", {**RMS, "tokens": 1500, "initial": "sphere"}), ("circle-5", {"tokens": 1500})):
        found = simulate(name, seeds=1, steps=4, **options)
        observable, curve = curves.growth(found)
        seen = found.trajectory.observed[observable].median(-1).values
        assert float(seen[4]) > 1.5 * float(seen[0])
        assert float(seen[4]) == pytest.approx(curve.values[4], rel=0.1)


def test_growth_is_by_the_factor_of_theory():
    found = simulate(dim=2, beta=1.0, seeds=1, steps=4, tokens=100)
    name, curve = curves.growth(found)
    assert name == "skewness"
    gamma = hermite_growth(3, variance=1.0, beta=1.0, tau=0.5)
    assert curve.values[1] / curve.values[0] == pytest.approx(gamma**2)
    found = simulate("circle-20", seeds=1, steps=2, tokens=100)
    name, curve = curves.growth(found)
    assert curve.values[1] / curve.values[0] == pytest.approx(sphere_growth(6, dim=2, beta=20.0, tau=0.5))


def test_weights_and_slopes_follow_their_laws_at_the_start():
    for name in ("self-weight-64", "slope-0.125"):
        found = simulate(name, seeds=1, steps=0)
        for observable, curve in curves.weights(found).items():
            assert float(found.trajectory.observed[observable][0, 0]) == pytest.approx(curve.values[0], abs=0.02)


@pytest.mark.parametrize(
    ("name", "options", "drawn"),
    [
        ("whitening", {"dim": 2, "beta": 1.0}, {"radius", "mean_fraction", "effective_rank", "self_weight", "slope"}),
        ("whitening", RMS, {"radius", "mean_fraction", "effective_rank", "self_weight", "slope"}),
        ("whitening", {**RMS, "dim": 2, "beta": 1.0}, set()),  # a circle from the first step on
        ("self-weight-64", {}, {"self_weight", "slope"}),  # a sphere on which logits are Gaussian
        ("whitening", {"contraction": "scalar", "initial": "circle"}, set()),
        ("circle-5", {}, set()),
        ("heads", {}, set()),
    ],
)
def test_gaussian_clouds_are_spoken_of_where_there_may_be_one(name, options, drawn):
    found = simulate(name, seeds=1, steps=1, **options)
    assert set(curves.moments(found)) | set(curves.weights(found)) == drawn


def test_the_hull_shrinks_within_its_bound():
    """By enumeration: |x_i' - x_j'| <= (1 - sum_k min(a_ik, a_jk)) diam <= the bound, and the bound is not idle."""
    found = simulate("no-residual", seeds=1, tokens=30, steps=6)
    diameters, bound = curves.hull(found)
    x = found.start[0]
    a = (0.2 * x @ x.mT).softmax(-1)
    assert diameters[0] == pytest.approx(max(float((p - q).norm()) for p in x for q in x))
    assert bound.values[1] == pytest.approx(diameters[0] * (1 - sum(float(a[:, j].min()) for j in range(30))))
    assert all(d <= b + 1e-12 * diameters[0] for d, b in zip(diameters[1:], bound.values[1:], strict=True))
    assert bound.values[1] < diameters[0]
    assert curves.hull(simulate(**RMS, seeds=1, steps=0)) is None


def test_plateaus_are_in_the_caption():
    figure = next(
        p for p in page_of(simulate("circle-20", seeds=1, steps=200)).sections[1].parts if p.name == "clusters"
    )
    assert "Plateaus" in figure.caption
    assert "to the end" in figure.caption


@pytest.mark.parametrize(
    ("name", "options"),
    [("whitening", {"dim": 2}), ("whitening", RMS), ("no-residual", {}), ("hopfield", {}), ("circle-5", {})],
)
def test_no_figure_is_shown_twice(name, options):
    sections = page_of(simulate(name, seeds=2, steps=3, **{**options, "tokens": 40})).sections
    names = [part.name for section in sections for part in section.parts if part.kind in ("figure", "cloud", "table")]
    assert len(names) == len(set(names)) > 8


def test_the_pair_energy_is_held_to_its_theorem_where_it_applies():
    assert curves.rising(simulate(**RMS, seeds=1, steps=0))
    for name in ("whitening", "descent-uniform-1", "causal", "hopfield", "no-residual"):
        assert not curves.rising(simulate(name, seeds=1, steps=0))


# Phase diagrams -------------------------------------------------------------------------------------------------------


def test_axes_are_read():
    assert parse_grid("beta=0.5:1.5:3, dim=2|8") == {"beta": (0.5, 1.0, 1.5), "dim": (2, 8)}
    assert parse_grid("contraction=zca|center+rms_norm") == {"contraction": ("zca", "center+rms_norm")}
    beta, dim = ranges_of({"beta": torch.tensor([0.5, 1.0]), "dim": [2.0, 8]})
    assert (beta.name, beta.values) == ("beta", (0.5, 1.0))
    assert (dim.name, dim.values) == ("dim", (2, 8))
    assert all(isinstance(value, int) for value in dim.values)


@pytest.mark.parametrize(
    "text", ["beta=0.1:4:12,tau=-0.5:1:8", "beta=0.1|0.7|0.9", "dim=1:9:3", "tau=0.123456789", "contraction=zca|center"]
)
def test_a_grid_is_written_as_it_is_read(text):
    assert grid_text(ranges_of(parse_grid(text))) == text


def test_a_point_of_the_grid_is_a_run_of_its_own():
    options = {"tokens": 80, "dim": 2, "steps": 60}
    found = sweep({"beta": [0.3, 0.8], "contraction": ["zca", "rms_norm"]}, engine="process", **options)
    assert found.complete
    words = '--sweep "beta=0.3|0.8,contraction=zca|rms_norm" --tokens 80 --dim 2 --steps 60'
    assert found.command == f"gradlogz simulate {words}"
    for i, beta in enumerate((0.3, 0.8)):
        for j, contraction in enumerate(("zca", "rms_norm")):
            alone = simulate(beta=beta, contraction=contraction, seeds=1, every=60, **options).verdict
            point = found.points[i, j]
            assert point.kind == alone.kind
            assert point.evidence["clusters"] == alone.evidence["clusters"]
            assert point.evidence["effective_rank"] == pytest.approx(alone.evidence["effective_rank"], rel=1e-6)


def test_processes_find_the_same():
    options = {"tokens": 40, "dim": 2, "steps": 10}
    one = sweep({"beta": [0.3, 0.8], "dim": [1, 2]}, engine="process", **options)
    two = sweep({"beta": [0.3, 0.8], "dim": [1, 2]}, workers=2, **options)
    assert {k: (v.kind, v.evidence) for k, v in two.points.items()} == {
        k: (v.kind, v.evidence) for k, v in one.points.items()
    }


def test_an_interrupt_keeps_what_is_done():
    def interrupt(done, total):
        if done:  # the first report is of the work that earlier calls have finished
            raise KeyboardInterrupt

    found = sweep({"dim": [1, 2, 3]}, engine="process", tokens=40, steps=5, progress=interrupt)
    assert len(found.points) == 1
    assert not found.complete


def test_descent_overshoots_where_the_mode_is_turned_over():
    for order in (1, 2, 3):
        for beta in (0.2, 0.5, 1.5):
            tau = overshoot(order, beta)
            assert hermite_growth(order, variance=1.0, beta=beta, tau=tau) == pytest.approx(-1)
    found = sweep({"beta": [0.5, 1.5], "tau": [-0.5, 0.5]}, engine="process", dim=2, tokens=40, steps=2)
    assert [line.name for line in boundaries(found) if len(line.x) > 1] == ["τ = 0", "γ of mode 3 = −1"]


def test_the_sentence_says_what_happened():
    found = simulate(dim=2, beta=1.0, tokens=100, seeds=2, every=600)
    sentence = verdict_sentence(found)
    assert all(part in sentence for part in ("600 steps", "2 clouds", "cluster count 3"))
    assert agreement(found)[0] == "silent", "other tokens than the preset's"
    assert "gradlogz simulate" in page_of(found).reproduce["command"]


def test_every_initial_distribution_has_a_sampler():
    assert tuple(SAMPLERS) == INITIAL


@pytest.mark.parametrize("contraction", ["sphere", "rms_norm"])
def test_the_slope_on_fixed_keys_is_that_of_their_variance(contraction):
    """Keys on the unit sphere have variance 1/d, on the sphere of radius sqrt(d) variance 1."""
    run = simulate(
        tokens=200, dim=16, beta=0.2, contraction=contraction, initial="sphere", keys=20_000, steps=1, seeds=2
    )
    measured = run.trajectory.observed["slope"].median(-1).values.tolist()
    assert curves.weights(run)["slope"].values == pytest.approx(measured, rel=0.05)


def test_one_fixed_key_has_no_boundary_of_uniqueness():
    phases = sweep({"beta": [0.5, 1.0], "tau": [0.1, 0.2]}, engine="process", tokens=10, steps=1, keys=1, dim=2)
    assert "β diam² = 4" not in [boundary.name for boundary in boundaries(phases)]


def test_a_step_that_maps_a_gaussian_to_a_point_has_no_growth_curve():
    """1 + tau beta = 0: no normalisation restores the cloud, and no mode has a factor."""
    run = simulate(dim=2, beta=2.0, tau=-0.5, tokens=60, steps=2, seeds=1)
    assert hermite_growth(3, variance=1.0, beta=2.0, tau=-0.5) == math.inf
    assert curves.growth(run) is None
    assert page_of(run).sections
