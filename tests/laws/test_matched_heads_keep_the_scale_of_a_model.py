"""Heads of the matched baseline have the QK spectra of their model and random singular vectors: B' = H_q B H_kᵀ."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers as tf

from gradlogz import capture
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.hypothesis_tests import matched_null
from gradlogz.probing.inside.architecture import Architecture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.events import Attended
from gradlogz.probing.passes.rotated_heads import rotated_statistics, rotation
from gradlogz.probing.prediction import Baseline, Probed
from gradlogz.probing.predictions import entropy
from gradlogz.probing.runs.judgement import Measured
from support import gauge
from support.architectures import ARCHITECTURES
from support.scales import close

NOTHING = Probed("", Architecture((), 0, (), {}, frozenset()), {}, 0)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
NAMES = ("bert", "albert", "gpt2", "gpt_neox", "llama", "qwen3", "phi3", "t5", "vit")
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
F64 = torch.float64


def batch_of(inputs):
    rows = len(next(iter(inputs.values())))
    return Batch(inputs, torch.arange(rows), 0, [f"row {i}" for i in range(rows)], torch.zeros(rows, dtype=torch.int64))


def rotated_events(model, inputs, seed):
    """Attention calls of one draw, by layer, as a prediction sees them."""
    seen = {}

    def statistics(event, batch_pass):
        assert isinstance(event, Attended)
        seen[event.layer] = event

    recorder = replace(entropy.PREDICTION, statistics=statistics, rescaled=False)
    (_,) = rotated_statistics(model, discover(model, inputs), batch_of(inputs), [recorder], [seed])
    return seen


def drawn(model, scale=0.3):
    """Give every parameter of a model random values, gains and biases of norms included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator) + (p.ndim == 1))
    return model.double().eval()


def gpt2():
    config = tf.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=32, **SIZES)
    model = drawn(tf.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa"))
    return model, gauge.gpt2_layers(model), [(block.ln_1, True) for block in model.transformer.h]


def bert():
    config = tf.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, max_position_embeddings=32,
        **SIZES,
    )  # fmt: skip
    model = drawn(tf.BertModel._from_config(config, attn_implementation="sdpa", add_pooling_layer=False))
    norms = [(model.embeddings.LayerNorm, True), (model.encoder.layer[0].output.LayerNorm, True)]
    return model, gauge.bert_layers(model), norms


def llama():
    config = tf.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=16, **SIZES
    )
    model = drawn(tf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa"))
    return model, gauge.llama_layers(model), [(layer.input_layernorm, False) for layer in model.model.layers]


def turn(part, norm, H):
    """W -> diag(1/g) H diag(g) W, with the bias that keeps z -> z W + b fixed at the norm's bias."""
    W, g = part.weight.clone(), norm.weight
    new = (H @ (g[:, None] * W)) / g[:, None]
    if part.bias is not None:
        part.bias.add_(norm.bias @ (W - new))
    part.weight.copy_(new)


@pytest.mark.parametrize("build", [gpt2, bert, llama])
def test_a_rotated_layer_is_a_layer_with_rotated_matrices(build):
    """Queries and keys of a model whose weights are rotated by hand; its first layer reads the same inputs."""
    model, layers, norms = build()
    inputs = {"input_ids": torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))}
    events = rotated_events(model, inputs, 5)
    (layer, *_), (norm, centres) = list(layers), norms[0]
    with torch.no_grad():
        for side, part in enumerate((layer.query, layer.key)):
            turn(part, norm, rotation(24, torch.Generator().manual_seed(2 * 5 + side), centres=centres))
    name, expected = next(iter(capture(model, inputs).attention.items()))
    for of in ("query", "key"):
        one, other = getattr(events[name], of), getattr(expected, of)
        close(one, other, scale=1e2 * float(other.abs().max()))
    close(events[name].attention.entropy, expected.attention.entropy, scale=1e4)


def test_spectra_are_kept_and_singular_vectors_are_not():
    _, (layer, *_), _ = llama()
    B = (layer.query.weight[:, :4] @ layer.key.weight[:, :4].mT).detach()
    one, other = (rotation(24, torch.Generator().manual_seed(s)) for s in (0, 1))
    turned = one @ B @ other.mT
    close(torch.linalg.svdvals(turned), torch.linalg.svdvals(B), scale=1e2)
    assert abs(float((turned * B).sum() / B.square().sum())) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_has_a_matched_baseline(name):
    """Fused, rotary, shared and grouped layers, norms of queries and keys, images, but no crossing ones."""
    architecture = BY_NAME[name]
    model, inputs = architecture.build(), architecture.inputs()
    before = copy.deepcopy(model.state_dict())
    events = rotated_events(model, inputs, 0)
    found = capture(model, inputs).attention
    assert set(events) == {layer for layer, each in found.items() if not each.crosses}
    for layer, event in events.items():
        assert event.query.shape == found[layer].query.shape
        assert event.key.shape == found[layer].key.shape
        for of in ("query", "key"):
            assert not torch.allclose(getattr(event, of), getattr(found[layer], of), atol=1e-3)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def rescaled_events(model, inputs, seed):
    """Attention calls of random queries of equal logit variance, by layer."""
    seen = {}

    def statistics(event, batch_pass):
        seen.setdefault(event.layer, []).append(event)

    recorder = replace(entropy.PREDICTION, statistics=statistics)
    (_,) = rotated_statistics(model, discover(model, inputs), batch_of(inputs), [recorder], [seed])
    return {layer: events[2] for layer, events in seen.items() if len(events) == 3}  # the model's, rotated, rescaled


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "t5"])
def test_random_queries_have_the_logit_variance_of_every_row(name):
    """Var over visible keys, weighted by exp(bias), against the definition; keys are those of the model."""
    architecture = BY_NAME[name]
    model, inputs = architecture.build().double(), architecture.inputs()
    events, found = rescaled_events(model, inputs, 0), capture(model, inputs).attention
    assert set(events) == {layer for layer, each in found.items() if not each.crosses}
    for layer, event in events.items():
        own = found[layer]
        close(event.key, own.key, scale=1e2 * float(own.key.abs().max()))
        variances = []
        for each in (own, event):
            k = each.key.repeat_interleave(each.query.shape[1] // each.key.shape[1], 1)
            s = each.query @ k.mT * each.arguments.scale
            weights = torch.stack([_base(each, s.shape, row) for row in range(s.shape[2])], 2)
            mean = (weights * s).sum(-1, keepdim=True)
            variances.append((weights * (s - mean).square()).sum(-1))
        close(variances[1], variances[0], scale=1e3 * float(variances[0].max()))
        turned = torch.nn.functional.cosine_similarity(event.query, own.query, dim=-1)
        assert turned.mean() < 0.7


def test_layers_with_learned_sinks_have_no_null_of_equal_variance():
    """The weight of a sink depends on the mean of the logits, which a rotation does not keep."""
    architecture = BY_NAME["gpt_oss"]
    assert rescaled_events(architecture.build(), architecture.inputs(), 0) == {}


def _base(event, shape, row):
    """Distribution of a row over its visible keys without the query: uniform, or proportional to exp(bias)."""
    call, n = event.arguments, shape[-1]
    logit = torch.zeros(*shape[:2], n, dtype=F64)
    if call.bias is not None:
        logit = logit + call.bias.expand(*shape[:3], n)[:, :, row]
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(*shape[:3], n)[:, :, row]
        logit = logit.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logit + mask
    if call.is_causal:
        logit = logit.masked_fill(torch.arange(n) > row, -torch.inf)
    return logit.softmax(-1).nan_to_num()


def test_draws_follow_from_their_seeds():
    model, _, _ = gpt2()
    inputs = {"input_ids": torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))}
    one, other, same = (rotated_events(model, inputs, seed) for seed in (1, 2, 1))
    name = next(iter(one))
    assert torch.equal(one[name].query, same[name].query)
    assert not torch.allclose(one[name].query, other[name].query)
    assert not torch.allclose(one[name].key, other[name].key)


@pytest.mark.parametrize("centres", [False, True])
def test_rotations_are_uniform(centres):
    """E[u_i² u_j²] over the sphere of dimension d is (1 + 2 [i = j]) / (d (d + 2)), of any column u."""
    d, generator = 5, torch.Generator().manual_seed(0)
    width = d + centres
    H = torch.stack([rotation(width, generator, centres=centres) for _ in range(4000)])
    close(H.mT @ H, torch.eye(width, dtype=F64).expand_as(H), scale=10.0)
    axis = torch.zeros(width, dtype=F64)
    axis[0] = 1.0
    if centres:
        ones = torch.ones(width, dtype=F64)
        close(H @ ones, ones.expand(4000, width), scale=10.0)
        axis = torch.tensor([1.0, -1.0, *[0.0] * (d - 1)], dtype=F64) / 2**0.5
    basis = torch.linalg.svd(torch.ones(1, width, dtype=F64)).Vh[1:] if centres else torch.eye(d, dtype=F64)
    u = (H @ axis @ basis.mT).square()
    expected = (torch.ones(d, d) + 2 * torch.eye(d)) / (d * (d + 2))
    error = 4 * (u.unsqueeze(-1) * u.unsqueeze(-2)).std(0) / len(u) ** 0.5
    assert ((u.mT @ u / len(u) - expected).abs() < error).all()


def test_bands_are_those_of_one_more_draw():
    """Of normal draws the band holds the next one 95 times in 100, whatever their number."""
    generator = torch.Generator().manual_seed(0)
    for m in (3, 20):
        values = 5 + 2 * torch.randn(4000, m + 1, generator=generator)
        held = 0
        for row in values.tolist():
            draws = tuple([Measured("a", 0, "x", v), Measured("a", None, "y", torch.nan)] for v in row[:-1])
            (null,) = matched_null(Baseline({}, NOTHING, draws), {"x", "y"})
            assert null[:3] == ("a", 0, "x")
            held += null.low <= row[-1] <= null.high
        assert abs(held / len(values) - 0.95) < 4 * (0.95 * 0.05 / len(values)) ** 0.5
    assert matched_null(None, {"x"}) == matched_null(Baseline({}, NOTHING, draws[:1]), {"x"}) == []
