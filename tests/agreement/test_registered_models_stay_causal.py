"""A registered model computes what its eager attention does, and no output depends on a later token.

In some architectures the causal flag of a layer is wrong, since its eager attention relies on the mask alone; in others
some layers have no softmax, or a layer selects keys by their indices.
"""

from copy import deepcopy

import pytest
import torch

import gradlogz
from gradlogz.attention.in_models import huggingface
from support.tiny_models import NotBuiltError, architectures, distance, output_of, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models
FEW = [
    ("causal", "bigbird_pegasus"), ("seq2seq", "nllb-moe"), ("causal", "gpt_oss"), ("causal", "kimi_linear"),
    ("causal", "minimax"), ("causal", "olmo_hybrid"), ("causal", "bailing_hybrid"), ("causal", "deepseek_v32"),
    ("causal", "glm_moe_dsa"), ("causal", "axk2"), ("causal", "hy_v4"), ("image", "siglip"),
]  # fmt: skip
NOT_CAUSAL = {"xlnet", "xlm", "fsmt", "cpmant"}  # the models themselves, whatever computes their attention


def check(kind, name):
    model, batch, expected = tiny(kind, name)
    gradlogz.register(model, strict=False)
    try:
        actual = output_of(model, batch)
        assert distance(actual, expected) < 1e-5, name
        tokens = {"causal": "input_ids", "seq2seq": "decoder_input_ids"}.get(kind)
        if tokens is not None and name not in NOT_CAUSAL:
            ids = batch[tokens].clone()
            ids[:, -1] = (ids[:, -1] + 1) % 60 + 4
            other = output_of(model, {**batch, tokens: ids})
            assert distance(other[:, :-1], actual[:, :-1]) < 1e-5, name
            assert distance(other[:, -1], actual[:, -1]) > 1e-3, name
    finally:
        gradlogz.attention.unregister(model)


@pytest.mark.parametrize(("kind", "name"), FEW)
def test_a_registered_model_is_the_eager_model_and_causal(kind, name):
    check(kind, name)


def test_a_model_that_is_loaded_with_the_implementation_is_causal_too():
    model, batch, expected = tiny("causal", "bigbird_pegasus")
    gradlogz.register()
    model.config._attn_implementation = "gradlogz"  # as from_pretrained does
    assert distance(output_of(model, batch), expected) < 1e-5


@pytest.mark.parametrize(("name", "omitted"), [("llama", True), ("gpt_oss", True), ("bigbird_pegasus", False)])
def test_a_mask_is_omitted_where_the_flags_of_the_layers_are_right(name, omitted):
    model, _, _ = tiny("causal", name)
    gradlogz.register(model)
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 3}
    mask = huggingface.mask_function(config=model.config, allow_is_causal_skip=True, **sizes)
    gradlogz.attention.unregister(model)
    assert (mask is None) == omitted


@pytest.mark.long
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_every_causal_architecture_stays_causal(kind):
    checked = 0
    for name in architectures(kind):
        try:
            check(kind, name)
        except (NotBuiltError, NotImplementedError):  # too large, or no layer uses transformers' attention interface
            continue
        checked += 1
    assert checked > {"causal": 110, "seq2seq": 12}[kind]


def test_a_hybrid_is_observed_and_refused_by_register_with_remedies_that_work():
    model, batch, expected = tiny("causal", "kimi_linear")
    with pytest.raises(NotImplementedError, match=r"KimiLinearDeltaAttention.*strict=False.*layers="):
        gradlogz.register(model)
    gradlogz.register(model, layers="(?i)attention(?<!DeltaAttention)$")
    assert distance(output_of(model, batch), expected) < 1e-5
    gradlogz.attention.unregister(model)
    for options in ({}, {"strict": False}, {"layers": "(?i)attention(?<!DeltaAttention)$"}):
        with gradlogz.observe(model, **options) as observed:
            assert distance(output_of(model, batch), expected) < 1e-5
        assert list(observed) == ["model.layers.1.self_attn"]
        if not options:
            assert list(observed.without_softmax) == ["model.layers.0.self_attn"]


def test_a_copy_runs_after_the_original_is_restored():
    model, batch, expected = tiny("causal", "llama")
    gradlogz.register(model)
    copy = deepcopy(model)
    gradlogz.attention.unregister()
    assert distance(output_of(copy, batch), expected) < 1e-5
    assert torch.equal(output_of(model, batch), expected)
