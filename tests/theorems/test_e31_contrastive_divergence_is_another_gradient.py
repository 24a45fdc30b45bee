"""The contrastive loss of a key is -log p(k+ | q) = G - <q, k+>, with gradient attention - k+.   [theory E31, 3.5, 6.6]

This is contrastive LEARNING. The note on exponential families says contrastive divergence, which replaces attention by
a few steps of a Markov chain from the data: another, biased gradient.
"""

import torch

import gradlogz as gz
from support.scales import close

STATEMENTS = ("E31",)


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
