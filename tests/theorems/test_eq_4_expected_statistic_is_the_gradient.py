"""E[u(x)] under p(x | eta) = ∇ log Z(eta).   [shim22, Eq. 4]

The left side is the mean of the library, the right side the expectation by its definition, and the gradient of a log
normaliser that is written out here.
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
def test_the_mean_is_the_expectation(name, seed):
    at = law(name, seed)
    h, x, log_mass, eta = at
    close(h.mean(eta), (log_mass + x @ eta).softmax(-1) @ x, at.scale())


@pytest.mark.parametrize("name", LAWS)
def test_the_mean_is_the_gradient_of_the_integral(name):
    at = law(name)
    h, x, log_mass, eta = at
    gradient = torch.func.grad(lambda e: (log_mass + x @ e).logsumexp(-1))(eta)
    close(h.mean(eta), gradient, at.scale())


@given(attentions())
def test_attention_averaging_is_exactly_the_gradient(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    gradient = torch.func.grad(lambda q: (keys @ q).logsumexp(-1))(query)
    close(h.mean(query), gradient, scale_of(h, query))
