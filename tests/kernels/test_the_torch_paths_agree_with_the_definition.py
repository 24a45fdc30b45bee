"""The kernels in plain torch, block by block or through torch's own flash attention, against the definition."""

import pytest
import torch

from gradlogz.attention import masks
from gradlogz.kernels.attention import blocked, derivatives, flash
from gradlogz.kernels.attention.blocked import Gradients, coefficients
from gradlogz.kernels.attention.dropout import Dropout
from gradlogz.kernels.attention.scoring import Scoring, Sight
from gradlogz.kernels.attention.wide_values import Chunked
from support.enumerated_attention import NAMES, cases
from support.scales import close


def problem(name):
    """A case in the form that kernels take."""
    query, key, value, options = cases()[name]
    h, m, n = query.shape[1], query.shape[2], key.shape[2]
    chosen = [options.get(k) for k in ("attn_mask", "bias", "segments")]
    sight = masks.sight(*chosen, lead=query.shape[:1], size=(h, m, n), like=query)
    band = masks.band(options.get("is_causal", False), options.get("window"))
    scoring = Scoring(options.get("scale", query.shape[-1] ** -0.5), options.get("softcap"), *band)
    return (query, key, value), sight, scoring


def pulled_back(operands, sight, scoring, dropout, gradients):
    """The statistics and the gradients of the operands, by the definition and torch's autograd."""
    inputs = [t.detach().requires_grad_() for t in operands]
    bias = None if sight.bias is None else sight.bias.detach().requires_grad_()
    found = derivatives.by_definition(*inputs, sight._replace(bias=bias), scoring, dropout)
    total = sum((t.masked_fill(t == -torch.inf, 0.0) * g).sum() for t, g in zip(found, gradients, strict=True))
    wanted = [*inputs, *([] if bias is None else [bias])]
    return found, torch.autograd.grad(total, wanted)


def random_gradients(operands):
    query, _, value = operands
    rows = query.shape[:-1]
    return Gradients(torch.randn(*rows, value.shape[-1]).double(), *(torch.randn(rows).double() for _ in range(4)))


@pytest.mark.parametrize("budget", [8, 40, 1 << 19])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_size_give_the_definition(name, drop, budget, monkeypatch):
    monkeypatch.setattr(blocked, "LOGITS_ON_CPU", budget)
    monkeypatch.setattr(blocked, "ROWS", 2 if budget < 1000 else 128)
    operands, sight, scoring = problem(name)
    dropout = Dropout(0.3, torch.tensor(11)) if drop else None
    gradients = random_gradients(operands)
    expected, expected_gradients = pulled_back(operands, sight, scoring, dropout, gradients)
    found = blocked.forward(*operands, sight, scoring, dropout)
    for actual, value in zip(found, expected, strict=True):
        close(actual, value.detach(), 10.0)
    row = coefficients(found, gradients, (gradients.output * found.output).sum(-1))
    whole = blocked.backward(*operands, sight, scoring, row, gradients.output, needs_bias=True, dropout=dropout)
    max_key = blocked.extreme_keys(*operands[:2], sight, scoring)[0]
    blocked.add_gradient_of_highest(whole, *operands[:2], scoring, max_key, gradients.max_logit)
    for actual, value in zip([g for g in whole if g is not None], expected_gradients, strict=True):
        close(actual, value, 100.0)


@pytest.mark.parametrize("name", NAMES)
def test_torchs_flash_attention_gives_output_and_log_normalizer(name):
    operands, sight, scoring = problem(name)
    if not flash.takes(operands[0], sight, scoring, operands[1].shape[2]):
        limits = (scoring.softcap, scoring.left, scoring.right, sight.segments)
        assert any(limit is not None for limit in limits), "what has no limits, torch takes"
        return
    gradients = random_gradients(operands)
    kept = Gradients(*gradients[:2], *(torch.zeros_like(g) for g in gradients[2:]))
    expected, expected_gradients = pulled_back(operands, sight, scoring, None, kept)
    found = flash.forward(*operands, sight, scoring)
    close(found.output, expected.output.detach(), 10.0)
    close(found.log_normalizer, expected.log_normalizer.detach(), 10.0)
    along = (gradients.output * found.output).sum(-1)
    row = coefficients(found, Gradients(*gradients[:2], None, None, None), along)
    whole = flash.backward(*operands, sight, scoring, row.log_normalizer, gradients.output, row.c0)
    for actual, value in zip(whole, expected_gradients, strict=False):
        close(actual, value, 100.0)


class OfFewColumns:
    """A kernel that refuses wide values; its coefficients of a row are G, and c0, c1 and c2 about the mean."""

    def __init__(self):
        self.mean = None

    def forward(self, query, key, value, sight, scoring, *, statistics, separate):
        assert value.shape[-1] <= 3
        return blocked.forward(query, key, value, sight, scoring)

    def coefficients(self, result, gradients):
        G, self.mean, *c = coefficients(result, gradients, (gradients.output * result.output).sum(-1))
        return torch.stack([G, *c])

    def backward(self, query, key, value, sight, scoring, per_row, grad_output, *, needs_bias):
        assert value.shape[-1] <= 3
        G, c0, *c = per_row
        row = blocked.Coefficients(G, self.mean, c0, *(c or (None, None)))
        return blocked.backward(query, key, value, sight, scoring, row, grad_output, needs_bias=needs_bias)


@pytest.mark.parametrize("name", ["plain", "bias beside a bool mask", "grouped heads", "everything"])
def test_wide_values_go_in_parts(name):
    (query, key, value), sight, scoring = problem(name)
    operands = (query, key, torch.cat([value, value.square()], -1))
    gradients = random_gradients(operands)._replace(max_logit=torch.zeros(query.shape[:-1]).double())
    expected, expected_gradients = pulled_back(operands, sight, scoring, None, gradients)
    chunked = Chunked(OfFewColumns(), 3)
    found = chunked.forward(*operands, sight, scoring, statistics=True)
    for actual, number in zip(found, expected, strict=True):
        close(actual, number.detach(), 10.0)
    per_row = chunked.coefficients(found, gradients)
    whole = chunked.backward(*operands, sight, scoring, per_row, gradients.output, needs_bias=True)
    for actual, number in zip([g for g in whole if g is not None], expected_gradients, strict=True):
        close(actual, number, 100.0)


def test_memory_is_linear():
    """At 4096 tokens the logits of a head are 64 MiB; no tensor of more than a block of them is ever made."""
    q, k, v = (torch.randn(1, 1, 4096, 8) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        blocked.forward(q, k, v, Sight(), Scoring(0.3))
    made = [event.cpu_memory_usage for event in profile.events() if event.name == "aten::empty"]
    assert 0 < max(made) <= 4 * max(blocked.LOGITS_ON_CPU, blocked.ROWS * 4096)
