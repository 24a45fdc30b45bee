"""The contrastive loss of a key is -log p(k+ | q) = G - <q, k+>, with gradient attention - k+.   [theory E31, 3.5, 6.6]

This is contrastive LEARNING. The note on exponential families says contrastive divergence, which replaces attention by
a few steps of a Markov chain from the data: another, biased gradient.
"""

import torch
from hypothesis import given
from torch.nn.functional import cross_entropy

import gradlogz as gz
from support.attention_strategies import attentions
from support.scales import close, scale_of


@given(attentions())
def test_the_loss_is_the_cross_entropy_of_the_logits(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    loss = cross_entropy((keys @ query).unsqueeze(0), torch.tensor([0]))
    close(-h.log_density(keys[0], query), loss, scale_of(h, query, 0))


@given(attentions())
def test_its_gradient_is_attention_minus_the_positive(attention):
    keys, query, _ = attention
    h = gz.Empirical(keys)
    gradient = torch.func.grad(lambda q: cross_entropy((keys @ q).unsqueeze(0), torch.tensor([0])))(query)
    close(h.mean(query) - keys[0], gradient, scale_of(h, query))


def metropolis(keys, query):
    """Proposals uniform over the keys, accepted by the ratio of their weights: rows are one step of the chain."""
    logits = keys @ query
    step = (logits - logits.unsqueeze(-1)).exp().clamp(max=1.0) / len(keys)
    return step - torch.diag(step.sum(-1) - 1)


def test_one_step_of_contrastive_divergence_is_another_gradient_and_many_steps_are_this_one():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [2.0, 2.0]], dtype=torch.float64)
    query = torch.tensor([0.5, -0.3], dtype=torch.float64)
    exact = gz.Empirical(keys).mean(query) - keys[0]
    chain = metropolis(keys, query)
    assert float((chain[0] @ keys - keys[0] - exact).norm()) > 0.1
    close(torch.linalg.matrix_power(chain, 200)[0] @ keys - keys[0], exact)
