"""log Z(q) = log sum_j exp(k_j·q): the log-sum-exp term of the modern Hopfield energy.   [shim22, Eq. 5]"""

import math

import mpmath
import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions(scales=(1e-3, 1.0)))
def test_the_log_normalizer_is_the_log_sum_exp(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    close(h.log_normalizer(query), torch.log(sum(torch.exp(k @ query) for k in keys)), scale_of(h, query, 0))


@given(attentions(max_keys=4, max_dim=2, scales=(1e4, 1e8)))
def test_it_holds_where_the_exponentials_overflow(attention):
    keys, query, _ = attention
    with mpmath.workdps(40):
        logits = [mpmath.fdot(k, query.tolist()) for k in keys.tolist()]
        peak = max(logits)
        exact = float(peak + mpmath.log(mpmath.fsum(mpmath.exp(s - peak) for s in logits)))
    h = gz.Empirical(keys)
    close(h.log_normalizer(query), torch.tensor(exact, dtype=torch.float64), scale_of(h, query, 0))


@given(attentions(scales=(1.0,)))
def test_the_hopfield_energy_is_made_of_it(attention):
    # E(x) = |x|²/2 - lse(beta, X x); its gradient vanishes where attention returns its query.
    patterns, x, _ = attention
    h, beta = gz.Empirical(patterns), 2.0

    def energy(y):
        return y @ y / 2 - (beta * patterns @ y).logsumexp(-1) / beta

    close(x @ x / 2 - h.log_normalizer(beta * x) / beta, energy(x), scale_of(h, beta * x, 0))
    close(x - h.mean(beta * x), torch.func.grad(energy)(x), scale_of(h, beta * x))


def test_one_key_has_the_log_normalizer_of_its_logit():
    G = gz.Empirical(torch.tensor([[3.0, 4.0]])).log_normalizer(torch.tensor([1.0, 1.0]))
    assert math.isclose(float(G), 7.0)
