"""A Hugging Face model that computes with `attend` is compiled in one graph, forward and backward."""

import pytest
import torch

import gradlogz
from support.architectures import ARCHITECTURES


@pytest.mark.parametrize(("name", "dynamic"), [("llama", None), ("bert", None), ("llama", True)])
def test_a_compiled_model_computes_the_same(name, dynamic):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    gradlogz.register()
    try:
        model, ids = architecture.build("gradlogz"), architecture.inputs()["input_ids"]
        expected = model(input_ids=ids).logits
        expected.square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        actual = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)(input_ids=ids).logits
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        actual.square().mean().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-5)
    finally:
        gradlogz.attention.unregister()
