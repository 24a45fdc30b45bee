"""Hugging Face models give the same logits and gradients with `attend` as with their eager attention.

Padded on either side, step by step with a cache, in training mode; and the statistics are those of the weights that the
eager implementation returns.
"""

import math

import pytest
import torch

import gradlogz
from support.architectures import ARCHITECTURES, TOKENS, kept, outputs_of

INTERFACE = [a for a in ARCHITECTURES if not a.fallback]
DECODERS = [a for a in ARCHITECTURES if a.kind == "decoder"]
IMPLEMENTED = [(a, i) for a in ARCHITECTURES for i in a.implementations]
PADDINGS = (None, "right", "left")


@pytest.fixture(autouse=True)
def registered():
    gradlogz.register()
    yield
    gradlogz.attention.unregister()


def paddings(architecture):
    return PADDINGS if architecture.kind in ("encoder", "decoder", "pair", "both") else (None,)


def same(actual, expected, times=1.0):
    """To float32 rounding through a few layers."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=times * 5e-6 * max(1.0, float(expected.abs().max())))


def gradients(architecture, model, inputs):
    model.zero_grad()
    weights = torch.Generator().manual_seed(2)
    total = 0.0
    for name, output in outputs_of(model, inputs).items():
        rows = kept(architecture, inputs, name, output)
        total = total + (rows * torch.randn(rows.shape, generator=weights)).sum()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", INTERFACE, ids=str)
def test_the_registered_implementation_is_that_of_the_model(architecture):
    eager, ours = architecture.build("eager"), architecture.build("gradlogz")
    for padding in paddings(architecture):
        inputs = architecture.inputs(padding)
        with torch.no_grad():
            expected, actual = outputs_of(eager, inputs), outputs_of(ours, inputs)
        for name in expected:
            same(kept(architecture, inputs, name, actual[name]), kept(architecture, inputs, name, expected[name]))


@pytest.mark.parametrize(("architecture", "implementation"), IMPLEMENTED, ids=str)
def test_an_observed_model_computes_what_it_did(architecture, implementation):
    eager, model = architecture.build("eager"), architecture.build(implementation)
    for padding in paddings(architecture):
        inputs = architecture.inputs(padding)
        with torch.no_grad(), gradlogz.observe(model) as seen:
            actual = outputs_of(model, inputs)
        with torch.no_grad():
            expected = outputs_of(eager, inputs)
        for name in expected:
            same(kept(architecture, inputs, name, actual[name]), kept(architecture, inputs, name, expected[name]))
        sharp = torch.cat([(a.entropy / a.entropy.amax()).flatten() for a in seen.values()]).std()
        assert sharp > 0.1, "attention must not be uniform, or a wrong mask would not be seen"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_gradients_in_training_mode_are_those_of_the_model(architecture):
    inputs = architecture.inputs("right")
    expected = gradients(architecture, architecture.build("eager").train(), inputs)
    observed = architecture.build("eager").train()
    with gradlogz.observe(observed):
        actual = gradients(architecture, observed, inputs)
    found = [actual]
    if not architecture.fallback:
        found.append(gradients(architecture, architecture.build("gradlogz").train(), inputs))
    for each in found:
        assert each.keys() == expected.keys()
        for name in expected:
            same(each[name], expected[name], times=10.0)


@torch.no_grad()
def steps(model, inputs):
    """The logits of the last tokens, one by one, after a prompt that fills the cache."""
    ids, mask, cache, found = inputs["input_ids"], inputs["attention_mask"], None, []
    for stop in range(TOKENS - 3, TOKENS + 1):
        start = 0 if cache is None else stop - 1
        result = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        found.append(result.logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("architecture", DECODERS, ids=str)
def test_decoding_step_by_step_with_a_cache(architecture, padding):
    inputs = architecture.inputs(padding)
    expected = steps(architecture.build("eager"), inputs)
    if not architecture.fallback:
        same(steps(architecture.build("gradlogz"), inputs), expected)
    for implementation in architecture.implementations:
        model = architecture.build(implementation)
        with gradlogz.observe(model) as seen:
            actual = steps(model, inputs)
        same(actual, expected)
        assert len(seen.passes) == 4
        assert all(a.entropy.shape[-1] == 1 for a in seen.values()), "one query at a time after the prompt"


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.kind == "pair"], ids=str)
def test_an_encoder_and_decoder_generates_the_same(architecture):
    inputs = {k: v for k, v in architecture.inputs("left").items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = architecture.build("eager").generate(**inputs, **options)
    assert torch.equal(architecture.build("gradlogz").generate(**inputs, **options), expected)
    model = architecture.build("eager")
    with gradlogz.observe(model) as seen:
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert len(seen.passes) == 7, "the encoder once, the decoder six times"


@pytest.mark.parametrize(
    "architecture", [a for a in INTERFACE if a.kind in ("encoder", "decoder", "image", "sound")], ids=str
)
def test_the_statistics_are_those_of_the_weights(architecture):
    """The model's own weights are the oracle; what they lack of one is the sink's."""
    # Experts are multiplied in float32 at most; ModernBERT's float32 softmax has NaN for the least number of float64.
    single = architecture.name in ("gpt_oss", "mixtral", "deepseek_v3", "modernbert")
    dtype = torch.float32 if single else torch.float64
    model, inputs = architecture.build("eager").to(dtype), architecture.inputs("right")
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
        with gradlogz.observe(model) as seen:
            model(**inputs)
    assert len(weights) == len(seen)
    for p, found in zip(weights, seen.values(), strict=True):
        p = p.double()
        rest = (1.0 - p.sum(-1, keepdim=True)).clamp(min=0.0)
        sinks = architecture.name == "gpt_oss"
        whole = torch.cat((p, rest), -1) if sinks else p
        entropy = -torch.special.xlogy(whole, whole).sum(-1)
        most, s = whole.amax(-1).log(), found.seen
        allowed = {"rtol": 1e-5, "atol": 5e-6}  # some eager softmaxes are float32 whatever the model
        torch.testing.assert_close(found.entropy[s].double(), entropy[s], **allowed)
        torch.testing.assert_close((found.max_logit - found.log_normalizer)[s].double(), most[s], **allowed)


def test_dropout_acts_in_training_alone():
    architecture = next(a for a in ARCHITECTURES if a.name == "bert")
    model, inputs = architecture.build("gradlogz", attention_probs_dropout_prob=0.5), architecture.inputs()
    still = outputs_of(model, inputs)["logits"]
    assert torch.equal(still, outputs_of(model, inputs)["logits"])
    model.train()
    once, twice = outputs_of(model, inputs)["logits"], outputs_of(model, inputs)["logits"]
    assert not torch.allclose(once, twice)
    assert not torch.allclose(once, still)


def test_statistics_have_gradients():
    """The entropy of a layer as part of the loss: against a difference quotient of the whole model."""
    architecture = next(a for a in ARCHITECTURES if a.name == "gpt2")
    model, inputs = architecture.build("sdpa").double(), architecture.inputs()
    weight = model.transformer.h[1].attn.c_attn.weight
    step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=weight.dtype)

    def entropy():
        with gradlogz.observe(model) as seen:
            model(**inputs)
        return seen["transformer.h.1.attn"].entropy.mean()

    (gradient,) = torch.autograd.grad(entropy(), weight)
    with torch.no_grad():
        size = 1e-5
        weight.add_(size * step)
        above = entropy()
        weight.sub_(2 * size * step)
        below = entropy()
    quotient = float(above - below) / (2 * size)
    assert math.isclose(float((gradient * step).sum()), quotient, rel_tol=1e-6)
