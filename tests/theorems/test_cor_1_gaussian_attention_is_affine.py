"""If h = N(mu, Sigma), then ∇ log ∫ exp<x, eta> h(dx) = mu + Sigma eta.   [shim22, Cor. 1; theory 3.4]

G = <mu, eta> + <eta, Sigma eta>/2, the covariance is Sigma for every query, and a singular Sigma is allowed.
"""

from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of

STATEMENTS = ("Cor. 1", "3.4 Gaussian")


@given(seeds, st.integers(1, 5), st.integers(1, 5))
def test_attention_over_gaussian_keys_is_affine(seed, d, rank):
    s = Source(seed)
    mu, A, eta = s.normal(d), s.normal(d, rank), s.normal(d)
    Sigma = A @ A.mT
    for h in (gz.Gaussian(mu, Sigma), gz.Gaussian.low_rank(mu, A)):
        close(h.log_normalizer(eta), mu @ eta + eta @ Sigma @ eta / 2, scale_of(h, eta, 0))
        close(h.mean(eta), mu + Sigma @ eta, scale_of(h, eta))
        close(h.covariance(eta), Sigma, scale_of(h, eta, 2))
