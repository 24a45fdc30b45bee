"""Sigmoid attention is attention to the sums of all subsets of keys; the oracle enumerates them.   [ramapuram24]"""

import itertools
import math

import pytest
import torch

from gradlogz import Empirical
from gradlogz.attention import SigmoidAttention, sigmoid_attend
from support.scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def operands(m, n):
    return drawn(1, 2, 3, m, 4), drawn(2, 2, 3, n, 4), drawn(3, 2, 3, n, 5)


def subsets(n):
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)), dtype=F64)


@pytest.mark.parametrize("offset", [0.0, -1.3])
def test_rows_are_distributions_of_subsets(offset):
    """Log normaliser, entropy, mean and variance of the logit, expected size and mean value over all 2^n subsets."""
    q, k, v = drawn(1, 6, 4), drawn(2, 7, 4), drawn(3, 7, 5)
    found = sigmoid_attend(q, k, v, offset=offset, scale=0.8)
    z = subsets(7)
    logits = (0.8 * q @ k.mT + offset) @ z.mT  # [m, 2^n]
    G = logits.logsumexp(-1)
    p = (logits - G.unsqueeze(-1)).exp()
    mean = (p * logits).sum(-1)
    close(found.log_normalizer, G, 100.0)
    close(found.output, p @ (z @ v), 100.0)
    close(found.mean_logit, mean, 100.0)
    close(found.entropy, -torch.special.xlogy(p, p).sum(-1), 100.0)
    close(found.logit_variance, (p * (logits - mean.unsqueeze(-1)).square()).sum(-1), 1000.0)
    close(found.total_weight, p @ z.sum(-1), 100.0)
    close(found.max_logit, (0.8 * q @ k.mT + offset).amax(-1), 10.0)


def test_it_is_the_mean_of_the_measure_of_subset_sums():
    """Values = keys and no offset: G and its gradient are those of 2^n points."""
    q, k = drawn(1, 6, 3), drawn(2, 8, 3)
    found = sigmoid_attend(q, k, k, offset=0.0, scale=1.0)
    h = Empirical(subsets(8) @ k)
    close(found.log_normalizer, h.log_normalizer(q), 100.0)
    close(found.output, h.mean(q), 100.0)
    gradient = torch.func.grad(lambda x: sigmoid_attend(x, k, k, offset=0.0, scale=1.0).log_normalizer.sum())
    close(found.output, gradient(q), 100.0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("m", [0, 3])
def test_without_keys_there_is_the_empty_subset(m, is_causal):
    found = sigmoid_attend(*operands(m, 0), is_causal=is_causal)
    assert found.output.shape == (2, 3, m, 5)
    for name, column in found._asdict().items():
        expected = -math.inf if name == "max_logit" else 0.0
        assert torch.equal(column, torch.full_like(column, expected))
    assert found.max_logit.shape == (2, 3, m)
    assert sigmoid_attend(*operands(m, 0), statistics="none").output.shape == (2, 3, m, 5)


def by_hand(q, k, v, seen, added=0.0):
    count = seen.sum(-1, keepdim=True, dtype=F64).clamp(min=1)
    s = q @ k.mT / math.sqrt(q.shape[-1]) + added - count.log()
    w = torch.where(seen, 1 / (1 + (-s).exp()), 0.0)
    return w @ v, torch.where(seen, s.exp().log1p(), 0.0).sum(-1), w.sum(-1)


@pytest.mark.parametrize(("m", "n"), [(6, 6), (4, 9), (9, 4), (1, 5)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [None, "pairs", "keys", "added", "bias"])
def test_masks_hide_keys_and_count_the_others(m, n, is_causal, masked):
    q, k, v = operands(m, n)
    seen = torch.ones(2, 3, m, n, dtype=torch.bool)
    if is_causal:
        seen = seen & torch.ones(m, n, dtype=torch.bool).tril(n - m)
    options, added = {}, torch.zeros(())
    if masked in ("pairs", "keys"):
        mask = drawn(5, *((3, m, n) if masked == "pairs" else (2, 1, 1, n))) > -0.3
        options, seen = {"attn_mask": mask}, seen & mask
    if masked in ("added", "bias"):
        added = drawn(6, 3, m, n)
        options = {"bias": added}
    if masked == "added":
        options = {"attn_mask": added.masked_fill(added > 1, -torch.inf)}
        seen = seen & (added <= 1)
    found = sigmoid_attend(q, k, v, is_causal=is_causal, **options)
    output, G, total = by_hand(q, k, v, seen, added)
    close(found.output, output, 10.0)
    close(found.log_normalizer, G, 10.0)
    close(found.total_weight, total, 10.0)
    empty = ~seen.any(-1)
    for statistic in (found.entropy, found.mean_logit, found.logit_variance, found.total_weight):
        assert bool((statistic[empty] == 0).all())
    assert bool((found.max_logit[empty] == -torch.inf).all())


def test_weights_of_zero_logits_do_not_grow_with_the_number_of_keys():
    zero = torch.zeros(50, 4, dtype=F64)
    found = sigmoid_attend(zero, zero, zero, is_causal=True)
    n = torch.arange(1, 51, dtype=F64)
    close(found.total_weight, n / (n + 1), 10.0)


def test_keys_do_not_compete():
    """Results over blocks of keys are added, whatever the other keys are."""
    q, k, v = operands(5, 8)
    parts = [sigmoid_attend(q, k[..., s, :], v[..., s, :], offset=-2.0) for s in (slice(3), slice(3, 8))]
    whole = sigmoid_attend(q, k, v, offset=-2.0)
    for index in (0, 1, 2, 3, 4, 6):
        close(parts[0][index] + parts[1][index], whole[index], 10.0)


def test_extreme_logits_stay_finite():
    q = torch.tensor([[400.0], [-400.0]], dtype=F64, requires_grad=True)
    found = sigmoid_attend(q, torch.ones(3, 1, dtype=F64), torch.ones(3, 1, dtype=F64), scale=2.0, offset=0.0)
    close(found.log_normalizer, torch.tensor([2400.0, 0.0], dtype=F64))
    close(found.entropy, torch.zeros(2, dtype=F64))
    (gradient,) = torch.autograd.grad(found.log_normalizer.sum() + found.entropy.sum(), q)
    close(gradient, torch.tensor([[6.0], [0.0]], dtype=F64))


@pytest.mark.parametrize("mask", [None, torch.ones(4, 4, dtype=torch.bool).triu(-1)])
def test_gradients_are_right(mask):
    tensors = [drawn(seed, 1, 2, 4, 3).requires_grad_() for seed in range(3)]
    bias = drawn(4, 4, 4).requires_grad_()

    def function(q, k, v, bias):
        found = sigmoid_attend(q, k, v, bias=bias, is_causal=True, attn_mask=mask)
        return found[:5]

    assert torch.autograd.gradcheck(function, (*tensors, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (*tensors, bias), fast_mode=True)


def test_blocks_of_queries_are_the_whole(monkeypatch):
    q, k, v = (t.requires_grad_() for t in operands(11, 13))
    whole = torch.autograd.grad(sigmoid_attend(q, k, v, is_causal=True).output.sin().sum(), (q, k, v))
    monkeypatch.setattr("gradlogz.kernels.losses.rowwise.logits_at_once", lambda _: 200)
    parts = torch.autograd.grad(sigmoid_attend(q, k, v, is_causal=True).output.sin().sum(), (q, k, v))
    for a, e in zip(parts, whole, strict=True):
        close(a, e, 10.0)


def test_a_layer_is_its_formula():
    layer, x = SigmoidAttention(8, 2, dtype=F64), drawn(0, 3, 6, 8)
    with torch.no_grad():
        layer.offset.copy_(torch.tensor([0.5, -1.0]))
    q, k, v = (p(x).reshape(3, 6, 2, 4).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    seen = torch.ones(3, 2, 6, 6, dtype=torch.bool).tril()
    output, G, _ = by_hand(q, k, v, seen, layer.offset[:, None, None])
    found, heads = layer.attend(x, is_causal=True)
    close(found, layer.out_proj(output.transpose(1, 2).reshape(3, 6, 8)), 10.0)
    close(heads.log_normalizer, G, 10.0)
