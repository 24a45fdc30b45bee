"""Two pretrained models give the same outputs with `attend`, registered or observed, and after it is taken away."""

import pytest
import torch

import gradlogz
from support import pretrained

CASES = {"minilm": ("last_hidden_state", 6, 12), "smollm2": ("logits", 30, 9)}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_pretrained_model_computes_the_same(name):
    output, layers, heads = CASES[name]
    model, inputs = getattr(pretrained, name)()
    rows = inputs["attention_mask"].bool()
    expected = model(**inputs)[output]
    # Rounding through all layers: what float32 loses in the model itself, against float64, is of this size.
    allowed = {"rtol": 0, "atol": 1e-5 * float(expected[rows].abs().max())}

    with gradlogz.observe(model) as seen:
        torch.testing.assert_close(model(**inputs)[output][rows], expected[rows], **allowed)
    assert seen.stack("entropy").shape == (layers, *inputs["input_ids"].shape[:1], heads, rows.shape[1])
    weights = model(**inputs, output_attentions=True).attentions
    for p, found in zip(weights, seen.values(), strict=True):
        entropy = -torch.special.xlogy(p, p).sum(-1)
        torch.testing.assert_close(found.entropy[found.seen], entropy[found.seen], rtol=1e-4, atol=1e-4)

    gradlogz.register(model)
    torch.testing.assert_close(model(**inputs)[output][rows], expected[rows], **allowed)
    gradlogz.attention.unregister(model)
    assert torch.equal(model(**inputs)[output], expected), "as it was before"
    gradlogz.attention.unregister()


@torch.no_grad()
def test_a_pretrained_model_generates_the_same_text():
    model, inputs = pretrained.smollm2()
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **options)
    with gradlogz.observe(model) as seen:
        assert torch.equal(model.generate(**inputs, **options), expected)
    assert len(seen.passes) == 8
