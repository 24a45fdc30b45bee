"""A band of level p holds what it is about with probability p, and a null band nothing else.   [theory 10, mardia74]"""

import math

import pytest
import scipy.stats
import torch

from gradlogz import Ascent, GaussianCloud, evolve
from gradlogz.dynamics import bootstrap_clouds, mardia_band, null_band, self_weight
from gradlogz.dynamics.gaussian_null import GIVEN_RADIUS, STEP, gaussian_clouds
from gradlogz.dynamics.intervals import band_of_draws, band_of_mean
from gradlogz.dynamics.observables import OBSERVABLES
from support.scales import close

F64 = torch.float64
TRIALS = 400
DISCRETE = ("clusters",)
ASCENT, CONTRACTION = Ascent(tau=0.5, beta=0.5), "rms_norm"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


def oblique(trials, n, seed=0):
    """Clouds from a Gaussian about no special place: a band must not need to know which."""
    A = torch.tensor([[1.0, 0.6], [0.0, 0.4]], dtype=F64)
    return torch.tensor([0.8, -0.3], dtype=F64) + gaussian(trials, n, 2, seed=seed) @ A


def observed(name, cloud):
    steps = int(name in STEP)
    return evolve(cloud, ASCENT, contraction=CONTRACTION, steps=steps, observe=[name]).observed[name][-1]


def share_held(band, values):
    return float(band.holds(values).double().mean())


def binomial_error(level, trials=TRIALS):
    return 4 * math.sqrt(level * (1 - level) / trials)


# Nulls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVABLES)
def test_a_null_band_holds_a_gaussian_cloud_as_often_as_it_says(name):
    level = 0.9
    cloud = gaussian(TRIALS, 24, 2) if name in GIVEN_RADIUS else oblique(TRIALS, 24)
    band = null_band(name, cloud, ASCENT, contraction=CONTRACTION, level=level, draws=39, generator=generator(1))
    held = share_held(band, observed(name, cloud))
    assert held >= level - binomial_error(level)
    if name not in (*DISCRETE, "radius"):  # ties and, of the radius, its own precision hold more
        assert held <= level + binomial_error(level)


@pytest.mark.parametrize("name", ["kurtosis", "sliced_wasserstein", "log_pair_energy", "entropy", "within"])
def test_a_null_band_leaves_out_what_is_no_gaussian(name):
    """Two clusters of the same moments in the mean."""
    cloud = oblique(20, 200)
    cloud = torch.where(torch.arange(200).unsqueeze(-1) < 100, 1.0, -1.0) + 0.2 * (cloud - cloud.mean(-2, keepdim=True))
    band = null_band(name, cloud, ASCENT, level=0.9, draws=39, generator=generator(1))
    assert share_held(band, observed(name, cloud)) < 0.1


@pytest.mark.parametrize(
    ("name", "cloud"),
    [
        ("mean_fraction", 0.5 + gaussian(20, 100, 3)),
        ("effective_rank", gaussian(20, 100, 3) * torch.tensor([1.0, 0.5, 0.5], dtype=F64)),
        ("log_det", gaussian(20, 100, 3) * torch.tensor([1.0, 0.5, 0.5], dtype=F64)),
    ],
)
def test_a_preferred_place_or_direction_is_noticed(name, cloud):
    band = null_band(name, cloud, level=0.9, draws=39, generator=generator(1))
    assert share_held(band, observed(name, cloud)) == 0.0


@pytest.mark.parametrize("placement", ["pre", "peri"])
def test_the_null_of_a_step_takes_the_same_step(placement):
    options = {"contraction": CONTRACTION, "placement": placement}
    cloud = oblique(TRIALS, 24)
    band = null_band("expansion", cloud, ASCENT, level=0.9, draws=39, generator=generator(1), **options)
    values = evolve(cloud, ASCENT, steps=1, observe=["expansion"], **options).observed["expansion"][-1]
    assert abs(share_held(band, values) - 0.9) < binomial_error(0.9)
    assert share_held(band, observed("expansion", cloud)) < 0.5, "the other placement is another step"


@pytest.mark.parametrize(("n", "d"), [(30, 3), (4, 3), (3, 5), (2, 1)])
def test_clouds_of_the_null_have_the_moments_of_the_cloud(n, d):
    """Also with fewer tokens than dimensions."""
    cloud = 1.0 + gaussian(2, n, d) @ gaussian(d, d, seed=1)
    found = gaussian_clouds(cloud, 5, generator=generator(2))
    assert found.shape == (5, 2, n, d)
    centred, expected = found - found.mean(-2, keepdim=True), cloud - cloud.mean(-2, keepdim=True)
    close(found.mean(-2), cloud.mean(-2).expand(5, 2, d), scale=100.0)
    close(centred.mT @ centred, (expected.mT @ expected).expand(5, 2, d, d), scale=1e3)
    assert n == 2 or float((found[0] - found[1]).abs().max()) > 0.1, "which are not all the same"


def test_clouds_of_the_null_have_the_law_of_a_sample_given_its_moments():
    """One dimension, three tokens of mean 0 and variance 1: a uniform angle in the plane of sum 0."""
    cloud = torch.tensor([[1.0], [0.0], [-1.0]], dtype=F64) * math.sqrt(1.5)
    found = gaussian_clouds(cloud, 4000, generator=generator())[..., 0]
    first, second = torch.tensor([1.0, -1.0, 0.0]) / math.sqrt(2), torch.tensor([1.0, 1.0, -2.0]) / math.sqrt(6)
    angle = torch.atan2(found @ first.double(), found @ second.double())
    assert scipy.stats.kstest(angle.numpy(), scipy.stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > 1e-3


def test_another_law_may_be_the_null():
    law = GaussianCloud(torch.zeros(2, dtype=F64), torch.diag(torch.tensor([4.0, 1.0], dtype=F64)))
    cloud = law.sample(50, generator=generator()).expand(TRIALS, 50, 2)
    band = null_band("effective_rank", cloud[0], gaussian=law, level=0.9, draws=399, generator=generator(1))
    others = GaussianCloud(law.mean.expand(TRIALS, 2), law.covariance.expand(TRIALS, 2, 2)).sample(
        50, generator=generator(2)
    )
    held = share_held(band, observed("effective_rank", others))
    # The band itself is a sample: its coverage has a beta law, of about the same error as the trials.
    assert abs(held - 0.9) < math.sqrt(2) * binomial_error(0.9)


@pytest.mark.parametrize("name", ["skewness", "kurtosis"])
@pytest.mark.parametrize(("n", "d"), [(200, 1), (200, 3), (1000, 2)])
def test_mardias_laws_agree_with_simulation(name, n, d):
    values = OBSERVABLES[name](gaussian(4000, n, d, seed=3), None, None)
    for level in (0.5, 0.9):
        band = mardia_band(name, n, d, level=level)
        # For kurtosis, whose law is a little skewed at these n, what both tails leave out is right to a hundredth.
        assert abs(share_held(band, values) - level) < binomial_error(level, 4000) + 0.01


@pytest.mark.parametrize(("n", "d"), [(8, 1), (30, 2), (12, 5)])
def test_mardias_moments_are_exact_for_few_tokens(n, d):
    cloud = gaussian(40_000, n, d, seed=4)
    skewness, kurtosis = (OBSERVABLES[name](cloud, None, None) for name in ("skewness", "kurtosis"))
    freedom = d * (d + 1) * (d + 2) / 6
    expected = 6 * ((n + 1) * (d + 1) - 6) / ((d + 1) * (n + 1) * (n + 3)) * freedom
    assert float(skewness.mean()) == pytest.approx(expected, abs=5 * float(skewness.std()) / 200)
    band = mardia_band("kurtosis", n, d)
    assert float(kurtosis.mean()) == pytest.approx(float(band.middle), abs=5 * float(kurtosis.std()) / 200)
    deviation = float(band.high - band.low) / (2 * scipy.stats.norm.ppf(0.975))
    assert float(kurtosis.std()) == pytest.approx(deviation, rel=0.05)


def test_the_sigmoid_law_lies_in_the_middle_of_the_null_of_the_self_weight():
    """Averaged over the lengths of the tokens: theirs is convex in |x|²."""
    cloud = gaussian(1024, 64)
    band = null_band("self_weight", cloud, Ascent(beta=0.05), draws=39, generator=generator())
    squares = cloud.square().sum(-1).tolist()
    theory = sum(self_weight(beta=0.05, squared_radius=r, variance=1.0, n=1024) for r in squares) / 1024
    assert float(band.middle) == pytest.approx(theory, rel=0.03)


# Bands ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "m"), [(0.9, 19), (0.95, 39), (0.5, 30)])
def test_order_statistics_hold_one_more_draw_whatever_the_law(level, m):
    draws, more = torch.empty(m + 1, 4000, dtype=F64).cauchy_(generator=generator(5)).split((m, 1))
    held = share_held(band_of_draws(draws, level=level), more[0])
    exact = 1 - 2 * int((m + 1) * (1 - level) / 2 + 1e-9) / (m + 1)
    assert exact >= level
    assert abs(held - exact) < binomial_error(exact, 4000)


@pytest.mark.parametrize("m", [2, 5, 20])
def test_students_band_holds_the_mean(m):
    band = band_of_mean(3.0 + gaussian(m, 4000, seed=6), level=0.9)
    assert abs(share_held(band, torch.full((4000,), 3.0, dtype=F64)) - 0.9) < binomial_error(0.9, 4000)


def test_seeds_give_a_trajectory_its_band():
    """100 trajectories of 4 seeds each; the truth is the mean of all 400."""
    clouds = gaussian(400, 30, 2, seed=7)
    options = {"contraction": "zca", "steps": 6, "observe": ["kurtosis", "entropy"], "every": 3}
    whole = evolve(clouds, Ascent(tau=0.5, beta=0.3), **options)
    for name in options["observe"]:
        truth = whole.observed[name].mean(-1)
        held = []
        for group in whole.observed[name].split(4, dim=-1):
            band = whole._replace(observed={name: group}).band(name, level=0.9)
            assert band.low.shape == whole.times.shape
            held.append(band.holds(truth))
        share = torch.stack(held).double().mean(0)
        assert bool((share >= 0.9 - binomial_error(0.9, 100)).all())
        assert bool((share <= 0.9 + binomial_error(0.9, 100)).all())


def test_a_band_of_clouds_holds_one_more_cloud():
    clouds = gaussian(40, 10, 30, 2, seed=8)
    found = evolve(clouds, ASCENT, contraction="zca", steps=3, observe=["entropy"])
    held = 0.0
    for more in range(40):
        rest = torch.cat((found.observed["entropy"][:, :more], found.observed["entropy"][:, more + 1 :]), 1)
        band = found._replace(observed={"entropy": rest[:, :, 0]}).band("entropy", level=0.95, of="cloud")
        held += float(band.holds(found.observed["entropy"][:, more, 0]).double().mean()) / 40
    assert held == pytest.approx(0.95, abs=1e-12), "exactly: each cloud is left out once, and two of 40 are the ends"


def test_the_bootstrap_band_of_one_cloud_holds_the_truth():
    """The radius of a Gaussian cloud, which is known."""
    n, trials, truth = 100, 200, math.sqrt(2.0)
    held = 0
    for seed in range(trials):
        clouds = bootstrap_clouds(gaussian(n, 2, seed=100 + seed), 199, generator=generator(seed))
        found = evolve(clouds, Ascent(tau=0.0), steps=0, observe=["radius"])
        held += int(found.band("radius", level=0.9, of="cloud").holds(torch.tensor([truth], dtype=F64)))
    assert abs(held / trials - 0.9) < binomial_error(0.9, trials)


def test_resampling_takes_tokens_of_the_cloud():
    cloud = gaussian(10, 3)
    found = bootstrap_clouds(cloud, 50, generator=generator())
    assert found.shape == (50, 10, 3)
    assert bool((found.unsqueeze(-2) == cloud).all(-1).any(-1).all())
    counts = (found.unsqueeze(-2) == cloud).all(-1).sum((0, 1))
    assert int(counts.sum()) == 500
    assert int(counts.min()) > 25
