"""Models outside the tested architectures: seen, with the statistics of the weights they return, or refused.

Most of these write out their softmax, each with its own number for a hidden key and its own order of dimensions.
"""

import math

import pytest
import torch
import transformers as tf

import gradlogz
from gradlogz import attention
from support.architectures import BERT, LLAMA, SIZES, TEXT, TOKENS, VISION, VOCABULARY

WIDE = {**BERT, "max_position_embeddings": 80}
WAVES = {
    **SIZES, "vocab_size": VOCABULARY, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip
GPT = {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4}

# Configuration, its options, the model's class, what it is given, how many rows of a layer are no padding.
SEEN = {
    "gpt_neo": (
        tf.GPTNeoConfig,
        {**TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
         "window_size": 4, "max_position_embeddings": 40}, tf.GPTNeoForCausalLM, "text", 20,
    ),
    "mpt": (
        tf.MptConfig, {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 40},
        tf.MptForCausalLM, "text", 20,
    ),
    "codegen": (tf.CodeGenConfig, {**GPT, "rotary_dim": 4}, tf.CodeGenForCausalLM, "text", 20),
    "openai-gpt": (tf.OpenAIGPTConfig, GPT, tf.OpenAIGPTLMHeadModel, "text", 20),
    "roformer": (tf.RoFormerConfig, {**BERT, "embedding_size": 32}, tf.RoFormerModel, "text", 20),
    "mpnet": (tf.MPNetConfig, BERT, tf.MPNetModel, "text", 20),
    "deberta": (
        tf.DebertaConfig, {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, tf.DebertaModel, "text",
        20,
    ),
    "xlm": (
        tf.XLMConfig, {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0},
        tf.XLMModel, "text", 20,
    ),
    "funnel": (
        tf.FunnelConfig, {"vocab_size": VOCABULARY, "block_sizes": [2], "d_model": 32, "n_head": 4, "d_head": 8,
                          "d_inner": 48, "num_decoder_layers": 0}, tf.FunnelBaseModel, "text", 20,
    ),
    "qwen3_next": (
        tf.Qwen3NextConfig,
        {**LLAMA, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
        tf.Qwen3NextForCausalLM, "text", 20,
    ),
    "diffllama": (tf.DiffLlamaConfig, LLAMA, tf.DiffLlamaForCausalLM, "text", 20),
    "swinv2": (tf.Swinv2Config, WINDOWS, tf.Swinv2Model, "image", 128),
    "yolos": (
        tf.YolosConfig, {**VISION, "image_size": [16, 16], "num_detection_tokens": 3}, tf.YolosModel, "image", 40,
    ),
}  # fmt: skip
WITHOUT_SOFTMAX = {
    "minimax": (
        tf.MiniMaxConfig,
        {**LLAMA, "head_dim": 8, "num_local_experts": 2, "block_size": 4,
         "layer_types": ["linear_attention", "full_attention"]},
        tf.MiniMaxForCausalLM, ["model.layers.1.self_attn"], {"model.layers.0.self_attn": "linear"},
    ),
    "qwen3_next": (
        *SEEN["qwen3_next"][:3], ["model.layers.1.self_attn"], {"model.layers.0.linear_attn": "linear"},
    ),
    "rwkv": (
        tf.RwkvConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
        tf.RwkvForCausalLM, [], {f"rwkv.blocks.{i}.attention": "linear" for i in range(2)},
    ),
}  # fmt: skip
REFUSED = {
    "wavlm": (tf.WavLMConfig, WAVES, tf.WavLMModel, "sound", "encoder.layers.0.attention .WavLMAttention., "),
    "yoso": (tf.YosoConfig, BERT, tf.YosoModel, "text", "encoder.layer.0.attention.self .YosoSelfAttention., "),
    "mamba": (
        tf.MambaConfig, {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}, tf.MambaForCausalLM,
        "text", "attention",
    ),
}  # fmt: skip


def build(config, options, kind):
    torch.manual_seed(0)
    model = kind._from_config(config(**options), attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0.0, 1.3 / math.sqrt(p[0].numel()))
    return model


def given(kind):
    generator = torch.Generator().manual_seed(1)
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if kind == "sound":
        return {"input_values": torch.randn(2, 400, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", SEEN)
def test_the_statistics_are_those_of_the_weights(name):
    config, options, kind, inputs, rows = SEEN[name]
    model, inputs = build(config, options, kind), given(inputs)
    keep = inputs.get("attention_mask", torch.ones(1)).bool()
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        with gradlogz.observe(model) as seen:
            actual = model(**inputs)
    padded = actual[0].shape[:2] == keep.shape
    scale = float(expected[0].abs().max())
    torch.testing.assert_close(
        actual[0][keep] if padded else actual[0], expected[0][keep] if padded else expected[0],
        rtol=0, atol=5e-6 * scale,
    )  # fmt: skip
    if name != "diffllama":  # which returns a difference of two weights
        for p, found in zip((p for p in expected.attentions if p is not None), seen.values(), strict=True):
            entropy = -torch.special.xlogy(p, p).sum(-1)
            s = found.seen
            torch.testing.assert_close(found.entropy[s], entropy[s], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                (found.max_logit - found.log_normalizer)[s], p.amax(-1).log()[s], rtol=1e-4, atol=1e-5
            )
    with gradlogz.monitor(model, every=1, thresholds=gradlogz.attention.Thresholds(None, None, None)) as m:
        model(**inputs)
        m.step()
    assert {heads.rows for heads in m.row().layers.values()} == {rows}
    assert all(bool(e.mean.isfinite().all()) for heads in m.row().layers.values() for e in heads[:5])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_softmax_is_refused(name):
    config, options, kind, inputs, message = REFUSED[name]
    model, inputs = build(config, options, kind), given(inputs)
    with pytest.raises(RuntimeError, match=message), gradlogz.observe(model):
        model(**inputs)


@pytest.mark.parametrize("name", WITHOUT_SOFTMAX)
def test_linear_attention_is_named(name):
    """Layers with a softmax have statistics; the others are named with their kind, and compute as usual."""
    config, options, kind, with_softmax, without = WITHOUT_SOFTMAX[name]
    model, inputs = build(config, options, kind), given("text")
    with torch.no_grad():
        expected = model(**inputs)[0]
        with gradlogz.observe(model) as seen:
            actual = model(**inputs)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6 * float(expected.abs().max()))
    assert list(seen) == with_softmax
    assert seen.without_softmax == without
    with gradlogz.monitor(model, every=1, thresholds=gradlogz.attention.Thresholds(None, None, None)) as m:
        model(**inputs)
        m.step()
    assert list(m.row().layers) == with_softmax
    assert m.row().without_softmax == tuple(without)


def test_the_layers_of_this_package_are_named():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [attention.LinearAttention(8, 2), attention.SigmoidAttention(8, 2), attention.CosineAttention(8, 2)]
            )

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model, x = Block(), torch.randn(2, 5, 8)
    expected = model(x)
    with gradlogz.observe(model) as seen:
        actual = model(x)
    torch.testing.assert_close(actual, expected)
    assert seen.without_softmax == {"layers.0": "linear", "layers.1": "sigmoid"}
    assert list(seen) == ["layers.2"]
    assert "2 layers without softmax" in repr(seen)
    seen.clear()
    assert not seen.without_softmax


class SigmoidSelfAttention(torch.nn.Module):
    """Attention of another library, by its name; one that calls softmax out of sight is not of this kind."""

    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.sigmoid(self.q(x) @ self.k(x).mT - math.log(x.shape[-2])) @ x


class LinearAttentionWithSoftmax(SigmoidSelfAttention):
    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).log_softmax(-1).exp() @ x


def test_a_name_alone_is_no_evidence():
    x = torch.randn(2, 5, 8)
    model = torch.nn.Sequential(SigmoidSelfAttention())
    with gradlogz.observe(model) as seen:
        model(x)
    assert seen.without_softmax == {"0": "sigmoid"}
    model = torch.nn.Sequential(LinearAttentionWithSoftmax())
    with pytest.raises(RuntimeError, match="LinearAttentionWithSoftmax"), gradlogz.observe(model):
        model(x)


def test_windows_of_keys_and_blocks_have_the_heads_of_the_layer():
    options = {**WIDE, "attention_window": 8}
    model = build(tf.LongformerConfig, options, tf.LongformerModel)
    ids = torch.randint(3, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), gradlogz.observe(model) as seen:
        weights = model(input_ids=ids, output_attentions=True).attentions
    for p, found in zip(weights, seen.values(), strict=True):
        torch.testing.assert_close(found.entropy, -torch.special.xlogy(p, p).sum(-1).reshape(2, 4, 64))
