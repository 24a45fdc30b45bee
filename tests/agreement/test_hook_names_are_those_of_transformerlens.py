"""Tensors under names of TransformerLens are those of hooks on the modules of the model, in its layout.

The expected tensors come from forward hooks on Hugging Face modules and from their own eager attention weights; no part
of the package computes them.
"""

import pytest
import torch
import transformers as tf

import gradlogz
from gradlogz.attention.in_models.block_numbers import block_numbers
from gradlogz.probing.inside.hook_names import TensorName

HEADS, SIZE, LAYERS, TOKENS = 4, 8, 2, 9
SIZES = {"vocab_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": HEADS * SIZE}


def gpt2():
    config = tf.GPT2Config(vocab_size=64, n_embd=HEADS * SIZE, n_layer=LAYERS, n_head=HEADS, n_positions=32)
    model = tf.GPT2Model._from_config(config, attn_implementation="eager")
    sites = {}
    for i in range(LAYERS):
        block = f"h.{i}"
        sites |= {
            f"blocks.{i}.qkv": (f"{block}.attn.c_attn", "output"),
            f"blocks.{i}.attn.hook_z": (f"{block}.attn.c_proj", "input"),
            f"blocks.{i}.hook_attn_out": (f"{block}.attn.c_proj", "output"),
            f"blocks.{i}.hook_resid_pre": (f"{block}.ln_1", "input"),
            f"blocks.{i}.hook_resid_mid": (f"{block}.ln_2", "input"),
            f"blocks.{i}.hook_mlp_out": (f"{block}.mlp", "output"),
            f"blocks.{i}.mlp.hook_pre": (f"{block}.mlp.c_fc", "output"),
            f"blocks.{i}.mlp.hook_post": (f"{block}.mlp.c_proj", "input"),
            f"blocks.{i}.hook_resid_post": (block, "output"),
        }
    return model, sites


def bert():
    config = tf.BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=32)
    model = tf.BertModel._from_config(config, attn_implementation="eager")
    sites = {}
    for i in range(LAYERS):
        block = f"encoder.layer.{i}"
        sites |= {f"blocks.{i}.attn.hook_{n[0]}": (f"{block}.attention.self.{n}", "output") for n in ("query", "key")}
        sites |= {
            f"blocks.{i}.attn.hook_v": (f"{block}.attention.self.value", "output"),
            f"blocks.{i}.attn.hook_z": (f"{block}.attention.output.dense", "input"),
            f"blocks.{i}.hook_attn_out": (f"{block}.attention.output.dense", "output"),
            f"blocks.{i}.hook_resid_pre": (f"{block}.attention.self.query", "input"),
            f"blocks.{i}.hook_resid_mid": (f"{block}.attention.output.LayerNorm", "input"),
            f"blocks.{i}.hook_mlp_out": (f"{block}.output.dense", "output"),
            f"blocks.{i}.mlp.hook_pre": (f"{block}.intermediate.dense", "output"),
            f"blocks.{i}.mlp.hook_post": (f"{block}.output.dense", "input"),
            f"blocks.{i}.hook_resid_post": (f"{block}.output.LayerNorm", "input"),
        }
    return model, sites


def llama():
    config = tf.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=32)
    model = tf.LlamaModel._from_config(config, attn_implementation="eager")
    sites = {}
    for i in range(LAYERS):
        block = f"layers.{i}"
        sites |= {f"blocks.{i}.attn.hook_{n}": (f"{block}.self_attn.{n}_proj", "output") for n in "qkv"}
        sites |= {
            f"blocks.{i}.attn.hook_z": (f"{block}.self_attn.o_proj", "input"),
            f"blocks.{i}.hook_attn_out": (f"{block}.self_attn.o_proj", "output"),
            f"blocks.{i}.hook_resid_pre": (f"{block}.input_layernorm", "input"),
            f"blocks.{i}.hook_resid_mid": (f"{block}.post_attention_layernorm", "input"),
            f"blocks.{i}.hook_mlp_out": (f"{block}.mlp", "output"),
            f"blocks.{i}.mlp.hook_pre": (f"{block}.mlp.gate_proj", "output"),
            f"blocks.{i}.mlp.hook_pre_linear": (f"{block}.mlp.up_proj", "output"),
            f"blocks.{i}.mlp.hook_post": (f"{block}.mlp.down_proj", "input"),
            f"blocks.{i}.hook_resid_post": (block, "output"),
        }
    return model, sites


MODELS = pytest.mark.parametrize("build", [gpt2, bert, llama])


def sharpened(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(12.0 if p.ndim == 2 else 1.0)
    return model.double().eval()


def batch():
    ids = torch.randint(3, 64, (2, TOKENS))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def by_hooks(model, sites, inputs):
    """The tensors at modules of the model, by forward hooks, and the attention weights that it returns."""
    found, handles = {}, []
    for name, (module, side) in sites.items():

        def hook(_module, args, output, name=name, side=side):
            tensor = args[0] if side == "input" else output
            found[name] = (tensor[0] if isinstance(tensor, tuple) else tensor).detach().clone()

        handles.append(model.get_submodule(module).register_forward_hook(hook))
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    for handle in handles:
        handle.remove()
    for i in range(LAYERS):
        if (joint := found.pop(f"blocks.{i}.qkv", None)) is not None:
            parts = joint.split(HEADS * SIZE, -1)
            found |= {f"blocks.{i}.attn.hook_{n}": part for n, part in zip("qkv", parts, strict=True)}
        found[f"blocks.{i}.attn.hook_pattern"] = output.attentions[i]
    return {
        name: t.unflatten(-1, (-1, SIZE)) if name.rpartition("_")[2] in "qkvz" and "attn.hook" in name else t
        for name, t in found.items()
    }


@MODELS
def test_every_name_has_the_tensor_of_the_module(build):
    model, sites = build()
    model, inputs = sharpened(model), batch()
    expected = by_hooks(model, sites, inputs)
    hooks = gradlogz.capture(model, inputs).hooks(pattern=True)
    assert set(hooks) - set(expected) == {
        f"blocks.{i}.attn.hook_rot_{n}" for i in range(LAYERS) for n in "qk" if build is llama
    }
    assert not set(expected) - set(hooks)
    real = inputs["attention_mask"].bool()
    close = 1e-5 if build is llama else 1e-9  # transformers computes the softmax of Llama in float32
    for name, tensor in expected.items():
        shown, wanted = (t.movedim(-2, 1) if "pattern" in name else t for t in (hooks[name], tensor))
        torch.testing.assert_close(shown[real], wanted[real], rtol=close, atol=close, msg=name)


def test_rotated_queries_and_keys_are_rotations_of_the_others():
    model, _ = llama()
    model, inputs = sharpened(model), batch()
    hooks = gradlogz.capture(model, inputs).hooks()
    angles = torch.arange(TOKENS)[:, None] / 10000.0 ** (torch.arange(0, SIZE, 2).double() / SIZE)  # [n, d/2]
    for i in range(LAYERS):
        for n in "qk":
            first, second = hooks[f"blocks.{i}.attn.hook_{n}"].chunk(2, -1)
            cos, sin = (f(angles)[None, :, None] for f in (torch.cos, torch.sin))
            expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            found = hooks[f"blocks.{i}.attn.hook_rot_{n}"]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # HF has the angles in float32
            assert not torch.allclose(found, hooks[f"blocks.{i}.attn.hook_{n}"])


@MODELS
def test_names_and_records_are_one_to_one(build):
    captured = gradlogz.capture(sharpened(build()[0]), batch())
    hooks = captured.hooks(pattern=True)
    back = {place: name for name, place in hooks.names.items()}
    assert len(back) == len(hooks) == LAYERS * (15 if build is llama else 12)
    for name, place in hooks.names.items():
        assert isinstance(place, TensorName)
        assert back[place] == name
        record = getattr(captured, place.record)[place.layer]
        if place.record == "sublayers" and not place.field.startswith("hidden"):
            assert hooks[name] is getattr(record, place.field)
        elif place.field in ("query", "key", "value"):
            assert hooks[name].data_ptr() == getattr(record, place.field).data_ptr()  # a view, not a copy


def test_weights_are_made_on_request_only():
    captured = gradlogz.capture(sharpened(gpt2()[0]), batch())
    assert not [name for name in captured.hooks() if "pattern" in name]
    assert captured.hooks(pattern=True)["blocks.1.attn.hook_pattern"].shape == (2, HEADS, TOKENS, TOKENS)


@MODELS
def test_observations_have_the_same_names(build):
    model, inputs = sharpened(build()[0]), batch()
    captured = gradlogz.capture(model, inputs).hooks()
    with torch.no_grad(), gradlogz.observe(model) as observation:
        model(**inputs)
    hooks = observation.hooks()
    for i, layer in enumerate(observation):
        name = f"blocks.{i}.attn"
        torch.testing.assert_close(hooks[f"{name}.hook_z"], captured[f"{name}.hook_z"])
        assert hooks[f"{name}.entropy"] is observation[layer].entropy
        assert hooks[f"{name}.log_normalizer"] is observation[layer].log_normalizer


def test_parallel_branches_have_no_middle():
    sizes = {"intermediate_size": 48, "max_position_embeddings": 32, "use_parallel_residual": True}
    model = sharpened(tf.GPTNeoXModel(tf.GPTNeoXConfig(**SIZES, **sizes)))
    inputs = batch()
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    hooks = gradlogz.capture(model, inputs).hooks()
    assert not [name for name in hooks if "resid_mid" in name]
    pre, post = hooks["blocks.0.hook_resid_pre"], hooks["blocks.0.hook_resid_post"]
    torch.testing.assert_close(pre, states[0])
    torch.testing.assert_close(post, states[1])
    torch.testing.assert_close(post, pre + hooks["blocks.0.hook_attn_out"] + hooks["blocks.0.hook_mlp_out"])


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        (["h.0.attn", "h.1.attn"], [0, 1]),
        (["model.layers.3.self_attn", "model.layers.7.self_attn"], [3, 7]),  # other layers have no attention
        (["groups.0.layers.0.attention", "groups.0.layers.0.attention#2"], [0, 1]),
        (["attention", "attention#2", "attention#3"], [0, 1, 2]),
        (["encoder.layer.10", "encoder.layer.2"], [10, 2]),
    ],
)
def test_blocks_have_the_numbers_of_their_layers(layers, numbers):
    assert block_numbers(layers) == numbers
