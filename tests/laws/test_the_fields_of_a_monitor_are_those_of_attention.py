"""The fields of a monitor's row are those of the attention weights, padding and packed documents included."""

import pytest
import torch
from torch import nn

import gradlogz
from gradlogz.attention.in_models import head_summaries
from gradlogz.attention.in_models.hidden_keys import padded
from gradlogz.attention.in_models.intercepted_calls import Logits, call_from_attend
from gradlogz.attention.in_models.layer_kinds import kind_of
from support.architectures import ARCHITECTURES
from support.small_trainings import GPT, batches

QUIET = gradlogz.attention.Thresholds(None, None, None)
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


def heads_of(call):
    return head_summaries.Transfer({"": head_summaries.sums_of(call)}).heads({})[""]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_norms_are_those_of_the_tokens_that_are_not_padding():
    q, k, v = drawn(2, 4, 5, 8), drawn(2, 2, 5, 8), drawn(2, 2, 5, 6)
    kept = torch.arange(5) < torch.tensor([[5], [3]])
    heads = heads_of(call_from_attend(q, k, v, attn_mask=kept[:, None, None], enable_gqa=True))
    for extremes, tensor in ((heads.query_norm, q), (heads.key_norm, k), (heads.value_norm, v)):
        norms = tensor.square().sum(-1).sqrt().transpose(0, 1)[:, kept]
        close(extremes.mean, norms.mean(-1))
        close(extremes.greatest, norms.amax(-1))
        close(extremes.deviation, norms.std(-1, correction=0))
    record = list(heads.records())[3]
    assert record["key_norm_mean"] == float(heads.key_norm.mean[1]), "of the key head of head 3"


def test_the_learned_sink_has_the_weight_that_the_keys_lack():
    q, k, sinks = drawn(2, 3, 6, 8), drawn(2, 3, 6, 8), torch.tensor([-1.0, 0.5, 2.0]).double()
    heads = heads_of(call_from_attend(q, k, k, sinks=sinks, is_causal=True))
    on_keys = gradlogz.attend(q, k, torch.ones(2, 3, 6, 1).double(), sinks=sinks, is_causal=True).output[..., 0]
    close(heads.learned_sink.mean, 1.0 - on_keys.mean((0, 2)))
    assert heads.scalars()["learned_sink"] == pytest.approx(float(1.0 - on_keys.mean()))
    assert "learned_sink" not in heads_of(call_from_attend(q, k, k)).scalars()


def test_the_spread_of_the_log_normalizer_is_that_of_its_rows():
    q, k = drawn(2, 3, 6, 8), drawn(2, 3, 6, 8)
    G = gradlogz.attend(q, k, k).log_normalizer.transpose(0, 1).flatten(1)
    close(heads_of(call_from_attend(q, k, k)).log_normalizer.deviation, G.std(-1, correction=0))


@pytest.mark.parametrize("order", ["packed", "interleaved"])
def test_the_sink_of_packed_documents_is_their_own_first_token(order):
    segments = torch.tensor([[7, 7, 7, 3, 3, 3, 3]] if order == "packed" else [[7, 3, 7, 3, 3, 7, 3]])
    q, k = drawn(1, 2, 7, 8), drawn(1, 2, 7, 8)
    weights = gradlogz.attend(q, k, torch.eye(7).double().expand(1, 2, 7, 7), segments=segments, is_causal=True).output
    first = [[segments[0].tolist().index(each) for each in segments[0].tolist()]]
    expected = weights.gather(-1, torch.tensor(first)[:, None, :, None].expand(1, 2, 7, 1))[..., 0]
    close(heads_of(call_from_attend(q, k, k, segments=segments, is_causal=True)).sink.mean, expected.mean((0, 2)))


def test_sink_heads_are_counted():
    q, k = torch.zeros(1, 4, 20, 4), torch.zeros(1, 4, 20, 4)
    k[:, 1:3, 0], q[:, 1:3] = torch.tensor([6.0, 12.0])[:, None], 1.0
    scalars = heads_of(call_from_attend(q, k, k)).scalars()
    assert scalars["share_of_sink_heads"] == 0.5
    assert scalars["sink_of_strongest_head"] > 0.99


def test_the_uniform_share_is_that_of_equal_weights():
    zero = torch.zeros(2, 1, 6, 4, dtype=torch.float64)
    kept = (torch.arange(6) >= torch.tensor([[0], [2]]))[:, None, None]
    segments = torch.tensor([[0, 0, 0, 0, 1, 1]])
    options = [
        {},
        {"is_causal": True},
        {"is_causal": True, "attn_mask": kept},
        {"is_causal": True, "segments": segments},
        {"segments": segments},
        {"window": (1, 0)},
        {"window": (0, 3)},
        {"is_causal": True, "attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    ]
    for each in options:
        heads = heads_of(call_from_attend(zero, zero, zero, **each))
        close(heads.uniform_sink, heads.sink.mean)


@pytest.mark.parametrize("offset", [0.0, 300.0, 5000.0, -5000.0])
def test_an_offset_of_the_logits_costs_no_digits(offset):
    """As attend's kernels: the maximum is subtracted first."""
    s = (3.0 * torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)) + offset).requires_grad_()
    found, p = Logits(s).attend(), s.detach().double().softmax(-1)
    mean = (p * (s.detach().double() - offset)).sum(-1, keepdim=True)
    entropy, variance = -(p * p.log()).sum(-1), (p * (s.detach().double() - offset - mean).square()).sum(-1)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.logit_variance.double(), variance, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(found.log_normalizer.double(), s.detach().double().logsumexp(-1), rtol=1e-6, atol=0.0)
    (gradient,) = torch.autograd.grad(found.entropy.sum(), s)
    expected = -p * (p.log() + entropy.unsqueeze(-1))
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=2e-6)


# Padding and selection -----------------------------------------------------------------------------------------------


def test_keys_that_nobody_selects_are_not_padding():
    """As in DeepSeek V3.2: each query sees a few of the keys before it, and some keys are seen by none."""
    n = 9
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    selected = causal & torch.rand(n, n, generator=torch.Generator().manual_seed(2)).lt(0.4)
    selected[:, 0], selected[:, 4], selected[:, n - 1] = True, False, False
    q = drawn(1, 2, n, 8)
    heads = heads_of(call_from_attend(q, q, q, attn_mask=selected[None, None]))
    assert heads.rows == n
    logits = (q @ q.mT / 8**0.5).masked_fill(~selected, -torch.inf)
    close(heads.max_logit.greatest, logits.amax((0, 2, 3)))


@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents"])
def test_padding_is_found_under_every_usual_mask(kind):
    n, kept = 8, torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]).bool()
    at = torch.arange(n)
    mask = {
        "full": torch.ones(n, n, dtype=torch.bool),
        "causal": at[:, None] >= at,
        "window": (at[:, None] >= at) & (at[:, None] - at < 3),
        "documents": (at[:, None] >= at) & (at[:, None] // 4 == at // 4),
    }[kind]
    assert torch.equal(padded(mask & kept[:, None]), ~kept)
    if kind == "full":
        assert torch.equal(padded(kept[:, None]), ~kept)


# Kinds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", {"full"}), ("gemma3", {"sliding", "full"}), ("gpt_oss", {"sliding", "full"}), ("deepseek_v3", {"MLA"})],
)
def test_rows_name_the_kind_of_each_layer(name, expected):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    model = architecture.build("eager").train()
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        model(**architecture.inputs())
        m.step()
    assert {heads.kind for heads in m.row().layers.values()} <= expected
    assert m.row().records()[0]["kind"] in expected


def test_cross_attention_is_a_kind():
    class CrossAttention(nn.Module):
        pass

    assert kind_of(CrossAttention()) == "cross"
    assert kind_of(nn.MultiheadAttention(4, 2)) == "full"


class LinearAttention(nn.Module):
    """Attention without softmax."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.query(x).exp() @ (self.key(x).exp().mT @ x)


def test_rows_name_the_layers_without_softmax():
    model = GPT(dropout=0.0)
    model.blocks[0].attention = LinearAttention()
    with gradlogz.monitor(model, every=1, thresholds=QUIET, strict=False) as m:
        model(batches(1)[0])
        m.step()
    assert m.row().without_softmax == ("blocks.0.attention",)
    assert list(m.row().layers) == ["blocks.1.attention"]
