"""NCA is attention: eta = 2 A x_i, keys b_j = A x_j of weight exp(-|b_j|²), over ALL other points.   [theory E21]

The paper (2.2) says that the denominator sums over the non-neighbours. The weights would not sum to one.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close, scale_of


def attention(b):
    """Every embedded point attends to the others: the diagonal of the per-query log weights is -inf."""
    log_weights = (-b.square().sum(-1)).expand(len(b), -1).clone().fill_diagonal_(-torch.inf)
    return gz.Empirical(b, log_weights)


@given(seed=seeds, n=st.integers(2, 7), d=st.integers(1, 4))
def test_neighbour_probabilities_are_attention_weights(seed, n, d):
    s = Source(seed)
    x, A = s.normal(n, d), s.normal(2, d)
    b = x @ A.mT
    similarity = torch.exp(-(b.unsqueeze(1) - b).square().sum(-1)).fill_diagonal_(0.0)
    h = attention(b)
    # exp(-distance²) alone loses digits where all of a row is tiny: distances up to |eta| |x| enter the scale twice.
    expected = similarity / similarity.sum(-1, keepdim=True)
    close(h.probabilities(2 * b), expected, scale_of(h, 2 * b, 0))


def test_a_sum_over_the_non_neighbours_does_not_normalise():
    x = torch.tensor([[0.0], [0.2], [1.0], [1.3]], dtype=torch.float64)
    label = torch.tensor([0, 0, 1, 1])
    similarity = torch.exp(-((x - x.mT) ** 2)).fill_diagonal_(0.0)
    others = (similarity * (label.unsqueeze(-1) != label)).sum(-1, keepdim=True)
    printed = similarity / others
    assert float((printed.sum(-1) - 1).abs().min()) > 0.3
    assert float((attention(x).probabilities(2 * x) - printed).abs().max()) > 0.1
