"""GaussianCloud says what evolve does to many tokens, and its closed forms are those of the integrals."""

import math

import pytest
import torch
from scipy.integrate import quad

from gradlogz import Ascent, Empirical, Gaussian, GaussianCloud, Mixture, evolve
from gradlogz.dynamics import LayerNorm
from gradlogz.dynamics.contraction import moments_of, projected_moments
from support.scales import close

F64 = torch.float64
CONTRACTIONS = [
    "none", "center", "scalar", "batch_norm", "zca", "pca", "cholesky", "monge", "sphere", "rms_norm", "layer_norm",
    "shrinkage", ("center", "rms_norm"), LayerNorm(torch.tensor([1.5, -0.5, 0.2], dtype=F64), torch.ones(3, dtype=F64)),
]  # fmt: skip


def cloud(d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(d, d, generator=generator, dtype=F64)
    return GaussianCloud(0.5 * torch.randn(d, generator=generator, dtype=F64), A @ A.mT / d + 0.3 * torch.eye(d))


@pytest.mark.parametrize("contraction", CONTRACTIONS, ids=str)
def test_one_step_of_many_tokens(contraction):
    """20 000 tokens that attend to each other: the moments agree to sampling error."""
    law = cloud()
    B = torch.tensor([[0.8, 0.3, 0.0], [-0.2, 1.0, 0.1], [0.0, 0.4, 0.6]], dtype=F64)
    W = torch.tensor([[0.5, 0.0, 0.2], [0.1, 0.9, 0.0], [0.0, -0.3, 1.0]], dtype=F64)
    ascent = Ascent(tau=0.5, beta=0.4, B=B, W_v=W)
    expected = law.evolve(ascent, contraction=contraction)
    tokens = law.sample(20_000, generator=torch.Generator().manual_seed(1)).float()
    single = Ascent(tau=0.5, beta=0.4, B=B.float(), W_v=W.float())
    found = evolve(tokens, single, contraction=contraction, steps=1).cloud.double()
    mean, covariance = moments_of(found)
    size = float(expected.covariance.diagonal().sum().sqrt()) + float(expected.mean.norm())
    torch.testing.assert_close(mean, expected.mean, rtol=0, atol=0.03 * size)
    torch.testing.assert_close(covariance, expected.covariance, rtol=0, atol=0.04 * size**2)


def test_projected_moments_in_one_dimension_are_signs():
    for m, c in ((0.3, 2.0), (-1.5, 0.2), (0.0, 1.0)):
        first, second = projected_moments(torch.tensor([m], dtype=F64), torch.tensor([[c]], dtype=F64))
        close(first, torch.tensor([math.erf(m / math.sqrt(2 * c))], dtype=F64))
        close(second, torch.ones(1, 1, dtype=F64))


@pytest.mark.parametrize("d", [2, 5, 40])
def test_projected_moments_of_a_round_cloud(d):
    zero, eye = torch.zeros(d, dtype=F64), torch.eye(d, dtype=F64)
    first, second = projected_moments(zero, 3.0 * eye)
    close(first, zero)
    close(second, eye / d)


def test_projected_moments_against_samples():
    law = cloud(4, seed=2)
    y = law.sample(1_000_000, generator=torch.Generator().manual_seed(3))
    u = y / y.norm(dim=-1, keepdim=True)
    first, second = projected_moments(*law)
    torch.testing.assert_close(first, u.mean(0), rtol=0, atol=3e-3)
    torch.testing.assert_close(second, u.mT @ u / len(u), rtol=0, atol=3e-3)
    close(second.diagonal().sum(), torch.ones((), dtype=F64))


def test_projected_moments_of_a_flat_cloud():
    """A singular covariance is that of a cloud in a subspace."""
    flat = cloud(2, seed=4)
    C = torch.zeros(3, 3, dtype=F64)
    C[:2, :2] = flat.covariance
    m = torch.cat((flat.mean, torch.zeros(1, dtype=F64)))
    first, second = projected_moments(m, C)
    inner, outer = projected_moments(*flat)
    close(first, torch.cat((inner, torch.zeros(1, dtype=F64))))
    close(second[:2, :2], outer)


def test_the_precision_falls_linearly():
    """C(t)^-1 = C(0)^-1 - 2 beta t, as the limit of small steps."""
    law, beta = GaussianCloud(torch.zeros(3, dtype=F64), cloud().covariance), 0.7
    time = 0.6 * float(law.blow_up_time(beta=beta))
    expected = law.flow(time, beta=beta)
    close(
        torch.linalg.inv(expected),
        torch.linalg.inv(law.covariance) - 2 * beta * time * torch.eye(3, dtype=F64),
        scale=100.0,
    )
    coarse, fine = (law.evolve(Ascent(tau=time / k, beta=beta), steps=k).covariance for k in (2000, 4000))
    torch.testing.assert_close(2 * fine - coarse, expected, rtol=1e-5, atol=1e-6)


def test_the_precision_of_three_thousand_tokens():
    law, beta = GaussianCloud(torch.zeros(2, dtype=F64), torch.diag(torch.tensor([1.0, 0.5], dtype=F64))), 0.3
    tokens = law.sample(3000, generator=torch.Generator().manual_seed(0))
    mean, _ = moments_of(tokens)
    time = 0.3 * float(law.blow_up_time(beta=beta))
    start = GaussianCloud(mean * 0, moments_of(tokens - mean)[1])
    found = evolve(tokens - mean, Ascent(tau=time / 30, beta=beta), contraction="center", steps=30).cloud
    torch.testing.assert_close(moments_of(found)[1], start.flow(time, beta=beta), rtol=0.05, atol=0.02)


def test_the_mean_outgrows_the_spread():
    """Under a norm of tokens the mean direction wins: one cluster.   [theory 4.4]"""
    law = GaussianCloud(torch.tensor([0.2, 0.0, 0.0, 0.0], dtype=F64), torch.eye(4, dtype=F64))
    end = law.evolve(Ascent(tau=0.5, beta=0.2), contraction="rms_norm", steps=40)
    assert float(end.mean.square().sum() / 4) > 0.999


def test_a_centred_cloud_becomes_a_line():
    law = GaussianCloud(torch.zeros(4, dtype=F64), torch.diag(torch.tensor([1.2, 1.0, 0.9, 0.8], dtype=F64)))
    end = law.evolve(Ascent(tau=0.5, beta=0.2), contraction="scalar", steps=200)
    assert float(end.covariance[0, 0]) == pytest.approx(4.0, rel=1e-6)


# Fixed keys -----------------------------------------------------------------------------------------------------------


def gaussian_keys(seed=5, d=3):
    law = cloud(d, seed)
    return Gaussian(law.mean, law.covariance)


@pytest.mark.parametrize(
    "contraction",
    ["none", "center", "scalar", "batch_norm", "zca", "cholesky", "monge", "shrinkage", "inverse_step", "recoloring"],
)
@pytest.mark.parametrize("natural", [False, True])
def test_on_gaussian_keys_the_moments_of_any_cloud_are_exact(contraction, natural):
    """The step is affine, so that the closed form holds for the moments of forty skewed tokens."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.rand(2, 40, 3, generator=generator, dtype=F64).log()
    heads = torch.randn(2, 3, 3, generator=generator, dtype=F64)
    B = heads[0] if contraction == "recoloring" else heads
    W = None if natural else torch.randn(B.shape, generator=generator, dtype=F64)
    tau, beta = torch.tensor([0.5, 1.0], dtype=F64), torch.tensor([0.4, 0.8], dtype=F64)
    ascent = Ascent(tau=tau, beta=beta, B=B, W_v=W, keys=gaussian_keys(), natural=natural)
    found = moments_of(evolve(tokens, ascent, contraction=contraction, steps=2).cloud)
    expected = GaussianCloud(*moments_of(tokens)).evolve(ascent, contraction=contraction, steps=2)
    for ours, theirs in zip(expected, found, strict=True):
        close(ours, theirs, scale=1e4 * (1 + float(theirs.abs().max())))


@pytest.mark.parametrize("residual", [False, True])
def test_drawn_keys_add_their_covariance(residual):
    law, keys = cloud(), gaussian_keys()
    W = torch.tensor([[0.5, 0.0, 0.2], [0.1, 0.9, 0.0], [0.0, -0.3, 1.0]], dtype=F64)
    step = {"tau": 0.6, "beta": 0.4, "W_v": W, "residual": residual, "draws": 3}
    tokens = law.sample(200_000, generator=torch.Generator().manual_seed(1))
    for fixed in (keys, None):
        expected = law.evolve(Ascent(keys=fixed, **step))
        # Each token draws from the Gaussian itself: attention of infinitely many tokens is attention to N(m, C).
        sampled = Gaussian(*law) if fixed is None else fixed
        found = evolve(tokens, Ascent(keys=sampled, generator=torch.Generator().manual_seed(2), **step), steps=1).cloud
        mean, covariance = moments_of(found)
        size = float(expected.covariance.trace())
        torch.testing.assert_close(mean, expected.mean, rtol=0, atol=0.01 * math.sqrt(size))
        torch.testing.assert_close(covariance, expected.covariance, rtol=0, atol=0.01 * size)


@pytest.mark.parametrize(("forms", "values"), [(0, 2), (1, 2), (2, 2), (2, 1), (2, 0)])
def test_keys_are_drawn_once_for_each_head_of_the_form(forms, values):
    """Drawn keys of the heads of B are independent; value matrices of one head act on the same keys."""
    law, keys = cloud(), gaussian_keys()
    s = torch.Generator().manual_seed(3)
    B, W = (torch.randn(h, 3, 3, generator=s, dtype=F64) if h else None for h in (forms, values))
    step = {"tau": 0.6, "beta": 0.4, "B": B, "W_v": W, "residual": False, "draws": 1, "keys": keys}
    tokens = law.sample(200_000, generator=s)
    expected = law.evolve(Ascent(**step)).covariance
    _, found = moments_of(evolve(tokens, Ascent(generator=s, **step), steps=1).cloud)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.trace()))


def test_opposite_values_of_the_same_keys_cancel():
    law, eye = cloud(), torch.eye(3, dtype=F64)
    ascent = Ascent(W_v=torch.stack((eye, -eye)), draws=1, residual=False)
    close(law.evolve(ascent).covariance, torch.zeros(3, 3, dtype=F64))
    tokens = law.sample(10, generator=torch.Generator().manual_seed(0))
    close(evolve(tokens, ascent, steps=1).cloud, torch.zeros(10, 3, dtype=F64))


def test_other_keys_are_integrated():
    """On the line, against adaptive quadrature of the definition: a mixture, its atoms as points, and as a measure."""
    m, c, beta, tau = 0.3, 0.8, 0.7, 0.5
    law = GaussianCloud(torch.tensor([m], dtype=F64), torch.tensor([[c]], dtype=F64))
    means, variances, log_w = (
        torch.tensor(t, dtype=F64) for t in ([-1.0, 2.0], [0.5, 0.3], [math.log(0.7), math.log(0.3)])
    )
    mixture = Mixture(log_w, Gaussian(means.unsqueeze(-1), variances[:, None, None]))

    def mixed(x):
        eta = beta * x
        G = [float(w) + float(a) * eta + float(v) * eta**2 / 2 for w, a, v in zip(log_w, means, variances, strict=True)]
        r = [math.exp(g - max(G)) for g in G]
        return sum(p * (float(a) + float(v) * eta) for p, a, v in zip(r, means, variances, strict=True)) / sum(r)

    def pointed(x):
        r = [math.exp(beta * x * float(a)) for a in means]
        return sum(p * float(a) for p, a in zip(r, means, strict=True)) / sum(r)

    points = means.unsqueeze(-1)
    for keys, attended in ((mixture, mixed), (points, pointed), (Empirical(points), pointed)):
        found = law.evolve(Ascent(tau=tau, beta=beta, keys=keys))

        def moment(power, attended=attended):
            def density(x):
                return math.exp(-((x - m) ** 2) / (2 * c)) / math.sqrt(2 * math.pi * c)

            return quad(lambda x: (x + tau * attended(x)) ** power * density(x), m - 10, m + 10, epsabs=1e-13)[0]

        assert float(found.mean) == pytest.approx(moment(1), abs=1e-9)
        assert float(found.covariance) == pytest.approx(moment(2) - moment(1) ** 2, abs=1e-9)


def test_integrated_moments_of_gaussian_keys_are_the_closed_form():
    law, h = cloud(2), gaussian_keys(d=2)
    one = Mixture(torch.zeros(1, dtype=F64), Gaussian(h.loc.unsqueeze(0), h.covariance_matrix.unsqueeze(0)))
    step = {"tau": 0.5, "beta": 0.4, "B": torch.tensor([[0.8, 0.3], [-0.2, 1.0]], dtype=F64)}
    closed, integrated = (law.evolve(Ascent(keys=keys, **step), contraction="rms_norm", steps=3) for keys in (h, one))
    for ours, theirs in zip(integrated, closed, strict=True):
        close(ours, theirs, scale=100.0)


# Gain and bias --------------------------------------------------------------------------------------------------------


def test_layer_norm_is_that_of_torch_with_gain_and_bias():
    generator = torch.Generator().manual_seed(0)
    x, gain, bias = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((2, 9, 4), (4,), (4,)))
    for parameters in ((None, None), (gain, None), (None, bias), (gain, bias)):
        close(LayerNorm(*parameters)(x), torch.nn.functional.layer_norm(x, (4,), *parameters, eps=0.0), 10.0)


def test_moments_of_layer_norm_with_gain_and_bias_against_samples():
    law = cloud(4, seed=7)
    gain, bias = torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=F64), torch.tensor([1.0, 0.0, -0.5, 0.3], dtype=F64)
    y = law.sample(1_000_000, generator=torch.Generator().manual_seed(8))
    found = moments_of(torch.nn.functional.layer_norm(y, (4,), gain, bias, eps=0.0))
    for ours, theirs in zip(LayerNorm(gain, bias).moments(*law), found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01)
