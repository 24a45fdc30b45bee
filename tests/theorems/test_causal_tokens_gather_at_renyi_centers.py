"""Under a causal mask tokens gather at Rényi centers of radius 4 / sqrt(beta).   [karagodin24]

    strong centers    farther than r from every earlier token: nearly at rest for long                   [Lemma 5.1]
    centers           farther than r from every earlier center: they move and some merge, but gather the rest

The published picture: n = 200 tokens on the circle, identity weights, beta = 64, times 75 and 150, where strong centers
have not visibly moved, and centers, one of which has merged, are where clusters are. Here with twenty seeds, and with
controls: no mask, other radii, other tokens as centers. Time is tau / (1 + tau) for a step on the sphere.
"""

import functools
import math

import pytest
import torch
from scipy.integrate import quad

from gradlogz import Ascent, evolve
from gradlogz.dynamics import renyi_centers

THEORY = ("karagodin24",)

F64 = torch.float64
NEAR = 0.05  # of the radius: the same cluster


def circle(clouds, n, seed=0):
    angle = 2 * math.pi * torch.rand(clouds, n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return torch.stack((angle.cos(), angle.sin()), -1)


START = circle(20, 200)


@functools.cache
def later(time, *, beta=64.0, causal=True):
    steps = round(time * 1.5 / 0.5)
    return evolve(START, Ascent(tau=0.5, beta=beta, causal=causal), contraction="sphere", steps=steps).cloud


def share_near(cloud, centers):
    """Of the tokens, those that are within reach of where one of the centers now is."""
    distance = torch.cdist(cloud, cloud).masked_fill(~centers.unsqueeze(-2), math.inf)
    return float((distance.amin(-1) <= NEAR).double().mean())


def gaps(cloud):
    """Angles between neighbouring clusters, over all clouds; a cluster is a chain of angles less than NEAR apart."""
    found = []
    for tokens in cloud:
        angle = torch.atan2(tokens[:, 1], tokens[:, 0]).sort().values
        ahead = (angle.roll(-1) - angle) % (2 * math.pi)
        last = (ahead > NEAR).nonzero().flatten()  # the last token of each cluster
        first = (last.roll(1) + 1) % len(angle)
        width = (angle[last] - angle[first]) % (2 * math.pi)
        middle = angle[first] + width / 2
        found.append((middle.roll(-1) - middle) % (2 * math.pi))
    return torch.cat(found)


# The definition -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.0, 0.3, 1.0, 10.0])
def test_centers_are_what_they_are_defined_to_be(radius):
    cloud = torch.randn(3, 60, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    found, strong = renyi_centers(cloud, radius=radius), renyi_centers(cloud, radius=radius, strong=True)
    for x, center, strong_center in zip(cloud, found, strong, strict=True):
        parked = []
        for i in range(60):
            if all(math.dist(x[i], x[j]) > radius for j in parked):
                parked.append(i)
            assert bool(strong_center[i]) == all(math.dist(x[i], x[j]) > radius for j in range(i))
        assert center.nonzero().flatten().tolist() == parked
        assert bool((center | ~strong_center).all()), "a strong center is a center"


def test_many_tokens_go_block_after_block():
    cloud = circle(1, 3000, seed=2)
    strong = renyi_centers(cloud, radius=0.2, strong=True)[0]
    center = renyi_centers(cloud, radius=0.2)[0]
    for i in (0, 5, 40, 1500, 2999):
        assert bool(strong[i]) == bool((torch.cdist(cloud[0, i : i + 1], cloud[0, :i]) > 0.2).all())
    near = torch.cdist(cloud[0], cloud[0][center])
    assert bool((near.amin(-1) <= 0.2).all()), "they cover the cloud"
    assert bool((torch.pdist(cloud[0][center]) > 0.2).all()), "and are apart"


def test_as_many_cars_park_as_renyi_says():
    """After s arrivals to a length, a part ∫_0^s exp(-2 ∫_0^u (1 - e^-v) / v dv) du is taken.   [renyi58]"""
    n, length = 2000, 2 * math.pi / 200
    centers = renyi_centers(circle(20, n), radius=2 * math.sin(length / 2))
    taken = float(centers.sum(-1).double().mean()) * length / (2 * math.pi)

    def left(u):
        return math.exp(-2 * quad(lambda v: -math.expm1(-v) / v, 0, u)[0]) if u > 0 else 1.0

    expected = quad(left, 0, n * length / (2 * math.pi))[0]
    assert expected == pytest.approx(0.7476 - 0.0315, abs=1e-3), "the constant of Rényi, less what is still to come"
    assert taken == pytest.approx(expected, abs=0.006)


# The picture ----------------------------------------------------------------------------------------------------------


def test_strong_centers_rest():
    strong = renyi_centers(START, radius=4 / math.sqrt(64), strong=True)

    def drift(cloud):
        return float(((cloud - START).norm(dim=-1) * strong).amax(-1).median())

    assert drift(later(75)) < 0.01
    assert drift(later(150)) < 0.03
    assert drift(later(150, causal=False)) > 0.3, "without a mask nothing does"


def test_centers_gather_the_other_tokens():
    centers = renyi_centers(START, radius=4 / math.sqrt(64))
    count = float(centers.sum(-1).double().mean())
    assert 8 < count < 10
    assert share_near(START, centers) < 0.2
    assert share_near(later(75), centers) > 0.98
    assert share_near(later(150), centers) > 0.99
    others = centers[:, torch.randperm(200, generator=torch.Generator().manual_seed(3))]
    assert share_near(later(150), others) < 0.8, "as many other tokens do not"


def test_another_radius_explains_less_or_says_more_than_there_is():
    wide, narrow = (renyi_centers(START, radius=r / math.sqrt(64)) for r in (8, 2))
    assert share_near(later(150), wide) < 0.75
    clusters = len(gaps(later(150))) / 20
    assert float(narrow.sum(-1).double().mean()) > 2 * clusters
    right = float(renyi_centers(START, radius=4 / math.sqrt(64)).sum(-1).double().mean())
    assert clusters < right < 1.4 * clusters, "some of which have merged"


@pytest.mark.parametrize("beta", [16.0, 64.0, 256.0])
def test_clusters_are_spaced_in_units_of_one_over_the_root_of_beta(beta):
    """Over a factor of 4 in the unit: hardly a gap below 4 of them, 6 to 7 in the middle; also without a mask."""
    found = gaps(later(150, beta=beta)) * math.sqrt(beta)
    assert 3.5 < float(found.quantile(0.05)) < 5.0
    assert 5.8 < float(found.median()) < 7.2
    assert float((gaps(later(0, beta=beta)) * math.sqrt(beta)).median()) < 3, "at the start they are not"
