"""Where clouds of tokens end: clusters, collapse, a Gaussian, frozen, or nowhere.   [theory 4.4, 10]"""

import math

import pytest
import torch

from gradlogz import Ascent, evolve
from gradlogz.dynamics import cluster_centers, cluster_stability, critical_beta, self_weight
from gradlogz.dynamics.contraction import NAMES
from support.scales import close

F64 = torch.float64
BETAS = torch.tensor([0.2, 0.4, 0.8], dtype=F64)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("d", [1, 2, 4, 6, *(pytest.param(d, marks=pytest.mark.long) for d in (3, 5))])
def test_whitening_ends_in_stable_clusters_at_least_one_more_than_dimensions(d):
    """Two seeds at three temperatures in one batch: d + 1 clusters or, rarely in these dimensions, one more."""
    cloud = gaussian(3, 2, 300, d)
    ascent = Ascent(tau=0.5, beta=BETAS[:, None].expand(3, 2))
    found = evolve(cloud, ascent, contraction="zca", steps=600)
    for i, verdict in enumerate(found.verdicts):
        centers, weights = cluster_centers(found.cloud[i // 2, i % 2])
        assert verdict.kind == "clusters"
        assert len(centers) == verdict.evidence["clusters"]
        assert len(centers) in (d + 1, d + 2)
        assert cluster_stability(centers, weights, beta=float(BETAS[i // 2]), tau=0.5).stable


def test_whitening_may_keep_a_cluster_at_the_centre_of_a_simplex():
    """300 tokens in five dimensions that stay seven clusters: six far out, and a large one at the mean."""
    generator = torch.Generator().manual_seed(77)
    torch.randn(300, 3, generator=generator, dtype=F64)
    cloud = torch.randn(300, 5, generator=generator, dtype=F64)
    first, second, found = (
        evolve(cloud, Ascent(tau=0.5, beta=0.4), contraction="zca", steps=n) for n in (200, 300, 1200)
    )
    centers, weights = cluster_centers(found.cloud)
    assert (300 * weights).round().tolist() == [210, 16, 16, 15, 15, 14, 14]
    assert float(centers[0].norm()) < 0.05 < 3.5 < float(centers[1:].norm(dim=-1).min())
    stability = cluster_stability(centers, weights, beta=0.4, tau=0.5)
    assert stability.stable
    assert stability.shape.shape == (5,)
    assert float(stability.residual) < 1e-6, "an equilibrium, which 3000 steps do not leave"
    before, after = (float((t.cloud @ t.cloud.mT - found.cloud @ found.cloud.mT).norm()) for t in (first, second))
    assert (after / before) ** 0.01 == pytest.approx(float(stability.shape[0]), abs=2e-3), "the slowest deviation"


@pytest.mark.long
def test_whitening_in_six_dimensions_ends_in_seven_or_eight_clusters():
    """Forty starts: both counts occur, and every end is stable."""
    counts = set()
    for seed in range(40):
        found = evolve(gaussian(300, 6, seed=1000 + seed), Ascent(tau=0.5, beta=0.4), contraction="zca", steps=1000)
        centers, weights = cluster_centers(found.cloud)
        assert cluster_stability(centers, weights, beta=0.4, tau=0.5).stable
        counts.add(len(centers))
    assert counts == {7, 8}


@pytest.mark.parametrize(
    ("contraction", "kind", "count"),
    [
        ("rms_norm", "collapsed", 1),
        ("layer_norm", "collapsed", 1),
        ("sphere", "collapsed", 1),
        ("batch_norm", "clusters", 2),
        ("scalar", "clusters", 2),
        (("center", "rms_norm"), "clusters", 2),
    ],
    ids=str,
)
def test_other_contractions_end_in_one_or_two(contraction, kind, count):
    verdict = evolve(gaussian(300, 8), Ascent(tau=0.5, beta=0.354), contraction=contraction, steps=600).verdict
    assert (verdict.kind, verdict.evidence["clusters"]) == (kind, count)


@pytest.mark.parametrize(("start", "beta"), [("gaussian", 0.5), ("uniform", 0.5), ("laplace", 0.3)])
@pytest.mark.parametrize("d", [1, 2])
def test_descent_makes_a_gaussian(start, beta, d):
    """Of heavy tails at a higher temperature: a token far out attends to itself."""
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(768, d, generator=generator, dtype=F64)
    signs = 1 - 2 * torch.randint(0, 2, (768, d), generator=generator)
    laplace = -(1 - uniform).log() * signs
    cloud = {"gaussian": gaussian(768, d), "uniform": uniform, "laplace": laplace}[start]
    found = evolve(cloud, Ascent(tau=-0.2, beta=beta), contraction="zca", steps=600, observe=["kurtosis"], every=600)
    assert abs(float(found.observed["kurtosis"][-1])) < 0.14
    assert found.verdict.kind == "gaussian", "within what a sample of a Gaussian shows, 99 times in 100"


def test_ascent_unmakes_one():
    found = evolve(gaussian(768, 2), Ascent(tau=0.5, beta=0.5), contraction="zca", steps=300)
    assert found.verdict.kind == "clusters"


@pytest.mark.parametrize(("beta", "counts"), [(5.0, {2, 3}), (20.0, {4, 5}), (80.0, {8, 9, 10})])
def test_clusters_on_the_circle(beta, counts):
    """Published and here: 2, 5 and 8 to 10 after long times, coarsening slowly."""
    angle = 2 * math.pi * torch.rand(2, 400, generator=torch.Generator().manual_seed(0), dtype=F64)
    cloud = torch.stack((angle.cos(), angle.sin()), -1)
    found = evolve(
        cloud, Ascent(tau=0.5, beta=beta), contraction="sphere", steps=1000, observe=["clusters"], every=1000
    )
    assert set(found.observed["clusters"][-1].tolist()) <= counts


def test_cold_clouds_are_frozen():
    cloud = gaussian(300, 32)
    found = evolve(
        cloud, Ascent(tau=0.5, beta=1.0), contraction="rms_norm", steps=100, observe=["self_weight"], every=100
    )
    assert found.verdict.kind == "frozen"
    assert float(found.observed["self_weight"][-1]) > 0.9


def test_a_cloud_without_contraction_blows_up_and_says_when():
    growing = evolve(gaussian(50, 2), Ascent(tau=10.0, beta=1.0), steps=1000)
    assert growing.verdict.kind == "blow-up"
    assert growing.verdict.evidence["step"] == int(growing.blown) > 10
    assert growing.step < 1000, "it does not go on for nothing"
    assert bool(torch.isfinite(growing.cloud).all()), "the last cloud that was one"
    pair = evolve(
        gaussian(2, 50, 2), Ascent(tau=torch.tensor([10.0, 0.001], dtype=F64)), contraction="center", steps=400
    )
    assert int(pair.blown[0]) > 10
    assert int(pair.blown[1]) == -1, "the other cloud goes on"


@pytest.mark.parametrize(("d", "beta"), [(64, 0.05), (64, 0.125), (128, 0.06)])
def test_the_weight_of_a_token_on_itself(d, beta):
    """sigmoid(beta r² - beta² r² c / 2 - log n), r² = d and c = 1."""
    directions = torch.nn.functional.normalize(gaussian(4, 1024, d), dim=-1) * math.sqrt(d)
    found = evolve(directions, Ascent(beta=beta), steps=0, observe=["self_weight"]).observed["self_weight"].mean()
    assert float(found) == pytest.approx(self_weight(beta=beta, squared_radius=d, variance=1.0, n=1024), abs=0.02)


def test_critical_temperatures():
    for d, expected in ((64, 0.115), (256, 0.0275), (768, 0.0091)):
        beta = critical_beta(1024, d)
        assert beta == pytest.approx(expected, abs=6e-4)
        assert self_weight(beta=beta, squared_radius=d, variance=1.0, n=1024) == pytest.approx(0.5, abs=1e-12)
    assert critical_beta(1024, 13) == math.inf


# How it is computed --------------------------------------------------------------------------------------------------


def test_a_step_is_what_the_formula_says():
    x, keys = gaussian(2, 7, 3), gaussian(2, 5, 3, seed=1)
    B, W = gaussian(2, 3, 3, seed=2), gaussian(2, 3, 3, seed=3)  # two heads
    found = evolve(x, Ascent(tau=0.3, beta=0.7, B=B, W_v=W, keys=keys), steps=1).cloud
    expected = x.clone()
    for head in range(2):
        for b in range(2):
            for i in range(7):
                a = torch.stack([0.7 * x[b, i] @ B[head] @ keys[b, j] for j in range(5)]).softmax(0)
                expected[b, i] += 0.3 * W[head] @ sum(a[j] * keys[b, j] for j in range(5)) / 2
    close(found, expected, scale=10.0)


def test_a_causal_token_sees_those_before_it():
    x = gaussian(6, 2)
    found = evolve(x, Ascent(tau=0.5, causal=True), steps=1).cloud
    for i in range(6):
        alone = (x[i] @ x[: i + 1].mT).softmax(0) @ x[: i + 1]
        close(found[i], x[i] + 0.5 * alone)


def test_placements():
    x = gaussian(9, 3)
    ascent = Ascent(tau=0.5)

    def A(y):
        return (y @ y.mT).softmax(-1) @ y

    def N(y):
        return y / y.norm(dim=-1, keepdim=True)

    expected = {"post": N(x + 0.5 * A(x)), "pre": x + 0.5 * A(N(x)), "peri": x + 0.5 * N(A(N(x)))}
    for placement, y in expected.items():
        close(evolve(x, ascent, contraction="sphere", steps=1, placement=placement).cloud, y)


def test_a_feed_forward_map_is_added():
    x = gaussian(9, 3)
    found = evolve(x, Ascent(tau=0.5, feed_forward=lambda y: -0.1 * y), steps=1).cloud
    close(found, 0.9 * evolve(x, Ascent(tau=0.5), steps=1).cloud)


def test_a_trajectory_goes_on_where_it_ended():
    cloud, names = gaussian(40, 3), ["radius", "displacement", "entropy"]
    options = {"contraction": "zca", "observe": names, "every": 5}
    whole = evolve(cloud, Ascent(tau=0.5), steps=30, **options)
    half = evolve(cloud, Ascent(tau=0.5), steps=15, **options)
    again = evolve(half, Ascent(tau=0.5), steps=15, **options)
    assert torch.equal(again.cloud, whole.cloud)
    assert again.times.tolist() == whole.times.tolist() == list(range(0, 31, 5))
    for name in names:
        torch.testing.assert_close(again.observed[name], whole.observed[name], equal_nan=True)


def test_every_record_of_a_continued_trajectory_has_one_time():
    cloud, ascent = torch.randn(12, 2, dtype=torch.float64), Ascent(tau=0.1)
    first = evolve(cloud, ascent, steps=4, observe=["radius", "entropy"])
    for steps, options, times, names in (
        (0, {"observe": ["radius", "entropy"]}, range(5), {"radius", "entropy"}),  # its end is recorded
        (2, {}, range(5), {"radius", "entropy"}),  # nothing new
        (2, {"observe": ["radius", "entropy"], "every": 10}, range(5), {"radius", "entropy"}),  # nothing yet
        (2, {"observe": ["radius"]}, range(7), {"radius"}),
        (2, {"observe": ["self_weight"]}, range(5, 7), {"self_weight"}),
    ):
        found = evolve(first, ascent, steps=steps, **options)
        assert found.times.tolist() == list(times)
        assert set(found.observed) == names
        assert all(len(values) == len(found.times) for values in found.observed.values())
        for name in names & set(first.observed):
            assert torch.equal(found.observed[name][:5], first.observed[name])
    silent = evolve(cloud, ascent, steps=4)
    assert silent.times.shape == (0,)
    found = evolve(silent, ascent, steps=1, observe=["radius"])
    assert found.times.tolist() == [4, 5]
    assert found.observed["radius"].shape == (2,)


def test_a_batch_is_a_loop():
    cloud, tau = gaussian(3, 20, 2), torch.tensor([0.1, 0.5, 1.0], dtype=F64)
    whole = evolve(cloud, Ascent(tau=tau, beta=0.4), contraction="zca", steps=5)
    for i in range(3):
        close(whole.cloud[i], evolve(cloud[i], Ascent(tau=float(tau[i]), beta=0.4), contraction="zca", steps=5).cloud)


def test_one_token_and_equal_tokens_are_defined():
    one = evolve(gaussian(1, 3), Ascent(tau=0.5), contraction="sphere", steps=10)
    assert one.verdict.kind == "collapsed"
    equal = evolve(gaussian(1, 3).expand(20, 3), Ascent(tau=0.5), contraction="rms_norm", steps=10)
    assert equal.verdict.kind == "collapsed"
    assert bool(torch.isfinite(equal.cloud).all())


def test_a_damped_hopfield_update_is_an_ascent_over_one_plus_tau():
    """[theory 5.6]: (x + tau att) / (1 + tau) = (1 - s) x + s att with s = tau / (1 + tau)."""
    x, patterns = gaussian(6, 3), gaussian(8, 3, seed=1)
    tau = 0.8
    found = evolve(x, Ascent(tau=tau, beta=2.0, keys=patterns), contraction="shrinkage", steps=1).cloud
    s = tau / (1 + tau)
    close(found, (1 - s) * x + s * (2.0 * x @ patterns.mT).softmax(-1) @ patterns)


def test_progress_ends(capsys):
    evolve(gaussian(5, 2), Ascent(), steps=3, progress=True)
    assert capsys.readouterr().err.endswith("100 %, 3/3 steps, 0 s\n")


@pytest.mark.parametrize("contraction", [*NAMES, "shrinkage", ("center", "rms_norm")], ids=str)
@pytest.mark.parametrize("n", [3, 20])
def test_a_cloud_that_blows_up_does_not_disturb_the_others(contraction, n):
    d = 2 if n == 3 else 5
    cloud = gaussian(4, n, d)
    cloud[0, 1, 0] = torch.nan
    cloud[2] *= 1e200
    options = {"contraction": contraction, "steps": 3}
    whole = evolve(cloud, Ascent(tau=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64)), **options)
    assert whole.blown.tolist() == [1, -1, 1, -1]
    torch.testing.assert_close(whole.cloud[::2], cloud[::2], rtol=0, atol=0, equal_nan=True)
    for i in (1, 3):
        alone = evolve(cloud[i], Ascent(tau=0.1 * (i + 1)), **options)
        close(whole.cloud[i], alone.cloud, scale=10.0)
        assert int(alone.blown) == -1
    for i in (0, 2):
        assert int(evolve(cloud[i], Ascent(), **options).blown) == 1


def test_tokens_meet_keys_in_the_precision_that_is_asked_for():
    x = gaussian(30, 8)
    near = x.bfloat16().double()
    weights = (0.3 * near @ near.mT).softmax(-1)
    found = evolve(x, Ascent(tau=0.5, beta=0.3, precision=torch.bfloat16), steps=1, observe=["self_weight"])
    torch.testing.assert_close(found.cloud, x + 0.5 * weights @ near, rtol=0, atol=2**-8 * float(near.abs().max()))
    assert found.cloud.dtype == F64
    expected = float(weights.diagonal().mean())
    assert float(found.observed["self_weight"][0]) == pytest.approx(expected, abs=1e-5)
