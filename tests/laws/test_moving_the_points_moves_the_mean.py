"""Order, multiplicity, masks, shifts, rotations and linear maps act on points as they must.   [theory 3.8, E30, E49]"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_agreement import agree, dot, longest, scales
from support.measure_registry import NAMES, Source, case, inside, magnitudes, seeds
from support.scales import close, scale_of


def points(seed):
    source = Source(seed)
    return source, source.normal(6, 3), source.normal(6)


@given(seed=seeds, magnitude=magnitudes)
def test_the_order_of_the_points_does_not_matter(seed, magnitude):
    source, x, log_w = points(seed)
    order = torch.randperm(6, generator=source.generator)
    eta = source.normal(4, 3) * magnitude
    agree(gz.Empirical(x[order], log_w[order]), gz.Empirical(x, log_w), eta, source.normal(4, 3))


@given(seed=seeds, magnitude=magnitudes)
def test_a_point_given_twice_is_a_point_of_weight_two(seed, magnitude):
    source, x, _ = points(seed)
    eta = source.normal(4, 3) * magnitude
    twice, weights = torch.cat((x, x[:2])), torch.tensor([2.0, 2, 1, 1, 1, 1], dtype=x.dtype)
    agree(gz.Empirical(twice), gz.Empirical.weighted(x, weights), eta, source.normal(4, 3))


@given(seed=seeds, magnitude=magnitudes)
def test_a_masked_point_is_one_of_weight_zero_is_one_removed(seed, magnitude):
    source, x, _ = points(seed)
    eta, vector = source.normal(4, 3) * magnitude, source.normal(4, 3)
    keep = torch.tensor([True, False, True, True, False, True])
    removed = gz.Empirical(x[keep])
    x = torch.where(keep.unsqueeze(-1), x, 1e8)  # wherever the hidden points are
    agree(gz.Empirical(x, keep), removed, eta, vector)
    agree(gz.Empirical(x, torch.where(keep, 0.0, -torch.inf).to(x.dtype)), removed, eta, vector)
    agree(gz.Empirical.weighted(x, keep.to(x.dtype)), removed, eta, vector)
    per_query = gz.Empirical(x, keep.expand(4, 6))
    agree(per_query, removed, eta, vector)
    close(per_query.support(vector), removed.support(vector), 10.0)


@given(seed=seeds, magnitude=magnitudes)
def test_each_query_sees_its_own_weights(seed, magnitude):
    source, x, _ = points(seed)
    eta, vector, log_w = source.normal(4, 3) * magnitude, source.normal(4, 3), source.normal(4, 6)
    log_w = log_w.masked_fill(source.normal(4, 6) > 1, -torch.inf)
    joint = gz.Empirical(x, log_w)
    for m in range(4):
        alone, row = gz.Empirical(x, log_w[m]), slice(m, m + 1)
        close(joint.log_normalizer(eta)[row], alone.log_normalizer(eta[row]), scale_of(alone, eta, 0))
        close(joint.mean(eta)[row], alone.mean(eta[row]), scale_of(alone, eta, 1))
        close(joint.covariance(eta)[row], alone.covariance(eta[row]), scale_of(alone, eta, 2))
        close(joint.entropy(eta)[row], alone.entropy(eta[row]), scale_of(alone, eta, 0))
        close(joint.support(vector)[row], alone.support(vector[row]), 10.0)


@pytest.mark.parametrize("weighted", [True, False])
@given(seed=seeds, magnitude=magnitudes)
def test_a_shift_of_the_keys_shifts_the_mean_and_nothing_else(weighted, seed, magnitude):
    """Keys of 13 bits and a shift of 2^30 add without rounding: what is tested is not the sum of the two."""
    source, x, log_w = points(seed)
    x, log_w = (x * 2**10).round() / 2**10, log_w if weighted else None
    shift = torch.tensor([2.0**30, -(2.0**29), 2.0**30], dtype=x.dtype)
    eta, vector = source.normal(4, 3) * magnitude, source.normal(4, 3)
    here, there = gz.Empirical(x, log_w), gz.Empirical(x + shift, log_w)
    close(there.log_normalizer(eta), here.log_normalizer(eta) + eta @ shift, scale_of(there, eta, 0))
    close(there.mean(eta), here.mean(eta) + shift, shift.norm())
    # Not one digit is lost to the size of the shift:
    scale = scales(here, eta)
    close(there.probabilities(eta), here.probabilities(eta), scale[0])
    close(there.entropy(eta), here.entropy(eta), scale[0])
    close(there.covariance(eta), here.covariance(eta), scale[2])
    third = here.third_cumulant(eta, vector, vector)
    close(there.third_cumulant(eta, vector, vector), third, scale[3] * longest(vector, vector))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(seed=seeds, extra=st.sampled_from([0, 1, -1]))
def test_a_linear_map_of_x_acts_on_eta_by_its_transpose(name, seed, extra):
    """W_# h + b: G(W^T eta) + <b, eta>, W mean + b, W F W^T, for W square, singular or rectangular."""
    h, at, source = case(name, seed)
    d, e, batch = h.dim, max(1, h.dim + extra), h.batch_shape
    W, b = source.normal(*batch, e, d) / math.sqrt(d), source.normal(*batch, e)
    image = gz.pushforward(h, W, b)
    eta = inside(image, source.normal(*at.shape[:-1], e))
    vector = source.normal(*at.shape[:-1], e)
    back, push = eta @ W, W.unsqueeze(-3)
    scale, F = scales(image, eta), push @ h.covariance(back) @ push.mT
    G = h.log_normalizer(back) + dot(b.unsqueeze(-2), eta)
    close(image.log_normalizer(eta), G, scale[0] + longest(b, eta))
    close(image.mean(eta), h.mean(back) @ W.mT + b.unsqueeze(-2), scale[1])
    close(image.covariance(eta), F, scale[2])
    product = (F @ vector.unsqueeze(-1)).squeeze(-1)
    close(image.covariance_product(eta, vector), product, scale[2] * longest(vector))


def congruence(A):
    """The matrix of X -> A X A^T in svec coordinates, column by column."""
    p = A.shape[-1]
    basis = gz.measures.smat(torch.eye(p * (p + 1) // 2, dtype=A.dtype))
    return gz.measures.svec(A @ basis @ A.mT).mT


def closed(source):
    """Pairs (image, family member): the maps under which each family is closed.   [theory 7.6]"""
    rotation = torch.linalg.qr(source.normal(3, 3)).Q
    A, b, c = source.normal(3, 3), source.normal(3), source.positive(3)
    x, log_w = source.normal(6, 3), source.normal(6)
    mu, Sigma, V = source.normal(3), source.covariance(3), source.covariance(2)
    k, rate, radius = source.positive(3), source.positive(3, low=1.0), source.positive()
    flip, order = torch.diag(source.normal(3).sign()), torch.eye(3, dtype=A.dtype)[[2, 0, 1]]
    log_p, B, df = source.log_simplex(3), source.normal(2, 2), source.positive(low=2.5, high=6.0)
    return {
        "points, affine": (gz.pushforward(gz.Empirical(x, log_w), A, b), gz.Empirical(x @ A.mT + b, log_w)),
        "points, rotation": (gz.pushforward(gz.Empirical(x), rotation), gz.Empirical(x @ rotation.mT)),
        "points, scale": (gz.pushforward(gz.Empirical(x), 0.25), gz.Empirical(0.25 * x)),
        "gaussian, affine": (
            gz.pushforward(gz.Gaussian(mu, Sigma), A, b),
            gz.Gaussian(A @ mu + b, (A @ Sigma @ A.mT + (A @ Sigma @ A.mT).mT) / 2),
        ),
        "sphere, rotation": (gz.pushforward(gz.Sphere(3, radius), rotation), gz.Sphere(3, radius)),
        "sphere, scale": (gz.pushforward(gz.Sphere(3, radius), 0.5), gz.Sphere(3, radius / 2)),
        "gamma, scale": (gz.pushforward(gz.Gamma(k, rate), torch.diag(c)), gz.Gamma(k, rate / c)),
        "inverse gaussian, scale": (
            gz.pushforward(gz.InverseGaussian(k, rate), torch.diag(c)),
            gz.InverseGaussian(k * c, rate * c),
        ),
        "spins, reflection": (gz.pushforward(gz.Spins(b), flip), gz.Spins(flip @ b)),
        "one hot, permutation": (gz.pushforward(gz.OneHot(log_p), order), gz.OneHot(order @ log_p)),
        "wishart, congruence": (
            gz.pushforward(gz.Wishart(df, V), congruence(B)),
            gz.Wishart(df, (B @ V @ B.mT + (B @ V @ B.mT).mT) / 2),
        ),
    }


@pytest.mark.parametrize("name", list(closed(Source(0))))
@settings(max_examples=8)
@given(seed=seeds)
def test_families_are_closed_under_their_own_maps(name, seed):
    source = Source(seed)
    image, member = closed(source)[name]
    eta = inside(member, source.normal(4, member.dim))
    agree(image, member, eta, source.normal(4, member.dim))
