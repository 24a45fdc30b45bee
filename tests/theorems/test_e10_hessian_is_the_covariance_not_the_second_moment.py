"""∇² log Z(eta) = E[u u^T] - E[u] E[u]^T under p(x | eta): the Fisher information.   [theory E10]

The paper prints E[u u^T], under p(x). Both differ: the mean is not subtracted, and the law is not tilted.
"""

import pytest
import torch
from hypothesis import given

import gradlogz as gz
from support.attention_strategies import attentions
from support.densities import LAWS, law
from support.measure_registry import seeds
from support.scales import close, scale_of


@pytest.mark.parametrize("name", LAWS)
@given(seed=seeds)
def test_the_hessian_is_the_covariance_of_the_tilted_law(name, seed):
    at = law(name, seed)
    h, x, log_mass, eta = at
    p = (log_mass + x @ eta).softmax(-1)
    away = x - p @ x
    close(h.covariance(eta), away.mT @ (p.unsqueeze(-1) * away), at.scale(2))


@given(attentions())
def test_it_is_the_hessian_of_the_log_sum_exp(attention):
    keys, query, s = attention
    h, v = gz.Empirical(keys), s.normal(len(query))
    hessian = torch.func.hessian(lambda q: (keys @ q).logsumexp(-1))(query)
    close(h.covariance(query), hessian, scale_of(h, query, 2))
    close(h.covariance_product(query, v), hessian @ v, scale_of(h, query, 2) * v.norm())


def test_the_second_moment_is_too_large_by_the_square_of_the_mean():
    keys = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, -1.0]], dtype=torch.float64)
    query, h = torch.tensor([0.5, 0.2], dtype=torch.float64), gz.Empirical(keys)
    p = (keys @ query).softmax(-1)
    second_moment = keys.mT @ (p.unsqueeze(-1) * keys)
    assert float((second_moment - h.covariance(query)).abs().max()) > 4.0
    close(second_moment - h.covariance(query), torch.outer(p @ keys, p @ keys), 10.0)


def test_the_covariance_of_h_itself_is_not_that_of_the_tilted_law():
    keys = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)  # centred: here E[u u^T] under h is its covariance, 1
    h = gz.Empirical(keys)
    close(h.covariance(torch.zeros(1).double()), torch.ones(1, 1).double())
    assert float(h.covariance(torch.tensor([2.0]).double())) < 0.1
