"""N(Sigma⁻¹mu, Sigma⁻¹) is an equilibrium of attention with affine renormalisation.   [shim22, Thm. 1; theory 4.1-4.3]

    step   T(eta) = eta + tau ∇G(eta) = (I + tau Sigma) eta + tau mu          h = N(mu, Sigma)
    RN     y -> m* + R (y - E y), with R Cov(y) R^T = C*                      the contractions of the package

The renormaliser must be an affine map that depends on the law through its two moments. The paper has layer norm in
mind, which is not of this kind (E17), and calls the key map eta -> Sigma eta a measure: h is the LAW of Sigma eta.
The statements take one renormaliser each; here are all of the package, on random laws, and those that do not serve.
"""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm

import gradlogz as gz
from gradlogz.dynamics.contraction import BatchNorm, Scalar, Shrinkage, Whitening
from support.measure_registry import Source, seeds
from support.scales import close

STATEMENTS = ("Thm. 1 (i)", "Thm. 1 (ii, iii)", "Thm. 1 (iv)", "E17")


def power(C, exponent):
    values, vectors = torch.linalg.eigh(C)
    return (vectors * values**exponent) @ vectors.mT


def whitening(kind):
    return lambda target: Whitening(kind, *target)


def recoloured(contraction):
    """A contraction to mean 0 and unit variances, taken to the target's mean and variances."""
    return lambda target: lambda y: target[0] + contraction(y) * target[1].diagonal().sqrt()


def cloud(s, mean, covariance):
    """Tokens with exactly these moments and a skewed law: whitened exponentials, coloured."""
    x = torch.log(s.positive(60, len(mean), low=1e-3, high=1.0))
    x = x - x.mean(0)
    return mean + x @ power(x.mT @ x / len(x), -0.5) @ power(covariance, 0.5)


def moments(y):
    return y.mean(0), (y - y.mean(0)).mT @ (y - y.mean(0)) / len(y)


def composite(h, tokens, target, renormaliser, tau):
    """RN after one step of attention, on every token."""
    return renormaliser(target)(tokens + tau * h.mean(tokens))


def setting(seed, d=3):
    s = Source(seed)
    mu, Sigma = s.normal(d), s.covariance(d)
    inverse = torch.linalg.inv(Sigma)
    inverse = (inverse + inverse.mT) / 2
    return s, mu, Sigma, (inverse @ mu, inverse)


def rounding(Sigma, tokens):
    """Inverse roots of covariances cost their condition number."""
    return torch.linalg.cond(Sigma) ** 2 * (1 + tokens.abs().max())


taus = st.sampled_from([0.1, 0.5, 2.0])
ROOTS = ["zca", "monge", "pca", "cholesky"]

# Theorem 1' ----------------------------------------------------------------------------------------------------------


@given(seeds)
def test_the_keys_sigma_eta_of_the_equilibrium_law_have_the_law_h(seed):
    s, mu, Sigma, (m, C) = setting(seed)
    keys, eta = gz.pushforward(gz.Gaussian(m, C), Sigma), s.normal(4, 3)
    close(keys.log_normalizer(eta), eta @ mu + (eta @ Sigma * eta).sum(-1) / 2, rounding(Sigma, eta) * (1 + mu.norm()))


@pytest.mark.parametrize("kind", ROOTS)
@given(seed=seeds, tau=taus)
def test_i_and_iv_the_gaussian_is_fixed_in_law_for_any_target(kind, seed, tau):
    s, mu, Sigma, theorem = setting(seed)
    h = gz.Gaussian(mu, Sigma)
    for m, C in (theorem, (s.normal(3), s.covariance(3))):
        # The composite on a cloud of moments (m, C) is affine, m + L (eta - m), and fixes N(m, C) iff L C L^T = C.
        tokens = cloud(s, m, C)
        out = composite(h, tokens, (m, C), whitening(kind), tau)
        L = torch.linalg.lstsq(tokens - m, out - m).solution.mT
        scale = rounding(Sigma, tokens) * torch.linalg.cond(C) * (1 + C.abs().max())
        close((tokens - m) @ L.mT, out - m, scale)
        close(L @ C @ L.mT, C, scale)


@pytest.mark.parametrize("kind", ["zca", "monge"])
@given(seed=seeds, tau=taus)
def test_ii_and_iii_every_law_with_the_moments_is_fixed_token_by_token(kind, seed, tau):
    s, mu, Sigma, target = setting(seed)
    tokens = cloud(s, *target)
    close(composite(gz.Gaussian(mu, Sigma), tokens, target, whitening(kind), tau), tokens, rounding(Sigma, tokens))


@pytest.mark.parametrize("kind", ["pca", "cholesky"])
def test_with_another_root_the_tokens_turn(kind):
    s, mu, Sigma, target = setting(0)
    tokens = cloud(s, *target)
    out = composite(gz.Gaussian(mu, Sigma), tokens, target, whitening(kind), 0.5)
    assert float((out - tokens).norm(dim=-1).median()) > 0.01
    for ours, theirs in zip(moments(out), target, strict=True):
        close(ours, theirs, rounding(Sigma, tokens))


def test_for_a_target_that_does_not_commute_with_sigma_even_zca_turns_the_tokens():
    s, mu, Sigma, _ = setting(0)
    target = (s.normal(3), s.covariance(3))
    tokens = cloud(s, *target)
    out = composite(gz.Gaussian(mu, Sigma), tokens, target, whitening("zca"), 0.5)
    assert float((out - tokens).norm(dim=-1).max()) > 0.01
    # composite = C*^(1/2) U C*^(-1/2) about the mean, U the orthogonal polar factor of (I + tau Sigma) C*^(1/2)
    left, _, right = torch.linalg.svd((torch.eye(3, dtype=torch.float64) + 0.5 * Sigma) @ power(target[1], 0.5))
    turn = power(target[1], 0.5) @ left @ right @ power(target[1], -0.5)
    close(out, target[0] + (tokens - target[0]) @ turn.mT, rounding(Sigma, tokens) * torch.linalg.cond(target[1]))


# What is special about these moments (4.2) ---------------------------------------------------------------------------


@given(seeds)
def test_with_the_exact_key_map_self_consistency_asks_for_mean_zero(seed):
    s, mu, Sigma, (_, inverse) = setting(seed)
    centred = gz.Gaussian(torch.zeros(3, dtype=torch.float64), inverse)
    keys, eta = gz.pushforward(centred, Sigma, mu), s.normal(4, 3)
    close(keys.log_normalizer(eta), eta @ mu + (eta @ Sigma * eta).sum(-1) / 2, rounding(Sigma, eta) * (1 + mu.norm()))


@given(seeds)
def test_the_one_query_that_attention_does_not_move_is_minus_the_mean_of_theorem_1(seed):
    _, mu, Sigma, (m, _) = setting(seed)
    close(gz.Gaussian(mu, Sigma).mean(-m), torch.zeros(3, dtype=torch.float64), rounding(Sigma, m))


# Which normalisers make it true (table 4.3) --------------------------------------------------------------------------


@given(seed=seeds, tau=taus)
def test_a_shrinkage_undoes_the_step_for_sigma_equal_to_the_identity(seed, tau):
    tokens = Source(seed).normal(5, 3)
    h = gz.Gaussian(torch.zeros(3).double(), torch.eye(3).double())
    close(Shrinkage(tau)(tokens + tau * h.mean(tokens)), tokens, 1 + tokens.abs().max())


@pytest.mark.parametrize(
    ("contraction", "equal"), [(BatchNorm(), False), (Scalar(), True)], ids=["batch norm", "one scalar"]
)
@given(seed=seeds, tau=taus)
def test_batch_norm_does_for_a_diagonal_sigma_and_a_scalar_for_a_multiple_of_one(contraction, equal, seed, tau):
    s = Source(seed)
    mu, variance = s.normal(3), s.positive().expand(3) if equal else s.positive(3)
    target = (mu / variance, torch.diag(1 / variance))
    tokens = cloud(s, *target)
    h = gz.Gaussian.diagonal(mu, variance)
    close(composite(h, tokens, target, recoloured(contraction), tau), tokens, rounding(target[1], tokens))


@pytest.mark.parametrize("contraction", [BatchNorm(), Scalar()], ids=["batch norm", "one scalar"])
def test_for_other_sigma_they_do_not(contraction):
    s, mu, Sigma, target = setting(0)
    tokens = cloud(s, *target)
    covariance = moments(composite(gz.Gaussian(mu, Sigma), tokens, target, recoloured(contraction), 0.5))[1]
    assert float((covariance - target[1]).abs().max()) > 0.05


@given(seed=seeds, tau=taus)
def test_a_natural_gradient_step_and_one_scalar_fix_every_cloud(seed, tau):
    s, mu, Sigma, (m, _) = setting(seed)
    tokens = s.normal(5, 3)
    y = tokens + tau * gz.Gaussian(mu, Sigma).natural_gradient(tokens)
    close(-m + (y + m) / (1 + tau), tokens, rounding(Sigma, tokens) * (1 + m.norm()))


def test_layer_norm_does_not_keep_the_gaussian_even_for_sigma_equal_to_the_identity():
    s = Source(0)
    h, target = gz.Gaussian(torch.zeros(4).double(), torch.eye(4).double()), torch.eye(4, dtype=torch.float64)
    tokens = cloud(s, torch.zeros(4).double(), target)
    out = layer_norm(tokens + 0.5 * h.mean(tokens), (4,), eps=0.0)
    assert float(out.norm(dim=-1).std()) < 1e-12  # one sphere
    assert float(tokens.norm(dim=-1).std()) > 0.3  # a cloud with the moments of the Gaussian has many radii
    assert float((moments(out)[1] - target).abs().max()) > 0.2


@given(seed=seeds, d=st.integers(2, 6), tau=taus)
def test_on_the_sphere_the_uniform_law_takes_its_place(seed, d, tau):
    s = Source(seed)
    r, z = s.positive(), s.normal(5, d)
    tokens = r * z / z.norm(dim=-1, keepdim=True)
    y = tokens + tau * gz.Sphere(d, r).mean(tokens)
    close(r * y / y.norm(dim=-1, keepdim=True), tokens)


# Through evolve, for any mean, covariance, temperature and matrices ---------------------------------------------------


def general(seed, tau, d=3):
    """An ascent on Gaussian keys with a random B, and tokens of any law."""
    s, mu, Sigma, _ = setting(seed, d)
    B = torch.eye(d, dtype=torch.float64) + 0.3 * s.normal(d, d)
    return s, gz.Ascent(tau=tau, beta=0.7, B=B, keys=gz.Gaussian(mu, Sigma)), B, torch.linalg.cond(Sigma)


@given(seed=seeds, tau=taus)
def test_the_inverse_step_leaves_every_cloud_unchanged(seed, tau):
    """Also for a value matrix that is not B: the contraction inverts the affine step itself."""
    s, ascent, _, condition = general(seed, tau)
    tokens = 3 * s.normal(12, 3)
    for W in (None, torch.eye(3, dtype=torch.float64) + 0.3 * s.normal(3, 3)):
        step = dataclasses.replace(ascent, W_v=W)
        matrix = step.inverse_step().matrix
        scale = torch.linalg.cond(matrix) * condition * (1 + tokens.abs().max())
        close(gz.evolve(tokens, step, contraction="inverse_step", steps=5).cloud, tokens, 10 * scale)
    natural = dataclasses.replace(ascent, natural=True)
    scale = condition**2 * torch.linalg.cond(ascent.B) ** 4 * (1 + tokens.abs().max())
    close(gz.evolve(tokens, natural, contraction="inverse_step", steps=5).cloud, tokens, 10 * scale)


@given(seed=seeds, tau=taus)
def test_the_inverse_step_is_the_resolvent_for_a_gradient_step(seed, tau):
    """(I + tau Sigma)^-1 (x - tau mu), the map of table 4.3."""
    s, mu, Sigma, _ = setting(seed)
    x, eye = s.normal(6, 3), torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.inv(eye + tau * Sigma) @ (x - tau * mu).mT
    inverse = gz.Ascent(tau=tau, keys=gz.Gaussian(mu, Sigma)).inverse_step()
    close(inverse(x), expected.mT, torch.linalg.cond(eye + tau * Sigma) * (1 + x.abs().max() + tau * mu.norm()))


def test_the_natural_inverse_is_one_scalar_about_minus_the_mean_of_theorem_1():
    s, mu, Sigma, (m, _) = setting(0)
    x = s.normal(6, 3)
    inverse = gz.Ascent(tau=0.5, keys=gz.Gaussian(mu, Sigma), natural=True).inverse_step()
    close(inverse(x), -m + (x + m) / 1.5, rounding(Sigma, x) * (1 + m.norm()))


@given(seed=seeds, tau=taus)
def test_recoloring_fixes_every_law_with_its_moments_for_any_mean_covariance_and_form(seed, tau):
    s, ascent, B, condition = general(seed, tau)
    target = ascent.recoloring()
    mu, Sigma = ascent.keys.loc, ascent.keys.covariance_matrix
    scale = condition**2 * torch.linalg.cond(B) ** 4
    # eta = beta B^T x has the moments of Theorem 1.
    close(0.7 * target.mean @ B, torch.linalg.solve(Sigma, mu), scale * (1 + mu.norm()))
    close(0.49 * B.mT @ target.covariance @ B, torch.linalg.inv(Sigma), scale)
    tokens = cloud(s, target.mean, target.covariance)
    close(gz.evolve(tokens, ascent, contraction="recoloring", steps=1).cloud, tokens, scale * (1 + tokens.abs().max()))


def test_with_another_value_matrix_recoloring_fixes_the_moments_and_turns_the_tokens():
    s, ascent, B, condition = general(0, 0.5)
    turned = dataclasses.replace(ascent, W_v=B + 0.5 * s.normal(3, 3))
    target = turned.recoloring()
    tokens = cloud(s, target.mean, target.covariance)
    out = gz.evolve(tokens, turned, contraction="recoloring", steps=1).cloud
    assert float((out - tokens).norm(dim=-1).median()) > 0.01
    for ours, theirs in zip(moments(out), (target.mean, target.covariance), strict=True):
        close(ours, theirs, condition**2 * torch.linalg.cond(B) ** 4 * (1 + tokens.abs().max()))
