"""qk_clip names the layer whose projections it cannot scale, and leaves the model as it was."""

import pytest
import torch
from torch import nn

from gradlogz import MultiheadAttention
from gradlogz.attention import qk_clip
from support.error_form import each_of, refused

two = torch.tensor([200.0, 50.0])


class Layer(nn.Module):
    """A layer with the modules and parameters that are given."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class CodeGenAttention(Layer):
    """Fused rows in an order of their own."""


def layer(**parts):
    return nn.ModuleDict({"attn": Layer(**parts)})


def linear(rows=8):
    return nn.Linear(8, rows)


ERRORS = [
    (TypeError, "qk_clip: model", "torch.nn.Module", lambda: qk_clip("model", {})),
    (ValueError, "qk_clip: tau", "positive", lambda: qk_clip(layer(), {}, tau=0.0)),
    (ValueError, "qk_clip: statistics", "'other'", lambda: qk_clip(layer(), {"other": two})),
    (TypeError, "qk_clip: statistics", "each head", lambda: qk_clip(layer(), {"attn": 200.0})),
    (TypeError, "qk_clip: statistics", "each head", lambda: qk_clip(layer(), two)),
    (NotImplementedError, "qk_clip: projections", "attn", lambda: qk_clip(layer(first=linear()), {"attn": two})),
    (
        ValueError,
        "qk_clip: projections",
        "wq",
        lambda: qk_clip(layer(first=linear()), {"attn": two}, projections=("wq", "wk")),
    ),
    (
        ValueError,
        "qk_clip: statistics",
        "heads",
        lambda: qk_clip(layer(q_proj=linear(9), k_proj=linear()), {"attn": two}),
    ),
    (
        ValueError,
        "qk_clip: statistics",
        "multiple",
        lambda: qk_clip(layer(q_proj=linear(), k_proj=linear(12)), {"attn": two}),
    ),
    (
        NotImplementedError,
        "qk_clip: model",
        "alone",
        lambda: qk_clip(nn.ModuleDict({"attn": CodeGenAttention(qkv_proj=linear(24))}), {"attn": two}),
    ),
    (
        NotImplementedError,
        "qk_clip: model",
        "alone",
        lambda: qk_clip(layer(query=linear(), key=linear(), logit_scale=nn.Parameter(torch.ones(2))), {"attn": two}),
    ),
    (
        NotImplementedError,
        "qk_clip: model",
        "gains",
        lambda: qk_clip(
            layer(
                q_proj=linear(),
                k_proj=linear(),
                q_norm=nn.RMSNorm(4, elementwise_affine=False),
                k_norm=nn.RMSNorm(4, elementwise_affine=False),
            ),
            {"attn": two},
        ),
    ),
]


@each_of(ERRORS)
def test_errors_name_the_argument(refusal):
    refused(refusal)


def test_a_refusal_leaves_the_model_as_it_was():
    model = nn.ModuleDict({"first": MultiheadAttention(8, 2), "second": Layer(first=linear())})
    weight = model["first"].in_proj_weight.clone()
    with pytest.raises(NotImplementedError):
        qk_clip(model, {"first": two, "second": two})
    assert torch.equal(model["first"].in_proj_weight, weight)


def test_a_norm_of_both_or_of_one_is_refused():
    """That of Llama 4, without a gain, is one module for queries and keys."""
    for norms in ({"qk_norm": nn.RMSNorm(4, elementwise_affine=False)}, {"q_norm": nn.RMSNorm(4)}):
        with pytest.raises(NotImplementedError, match="gains"):
            qk_clip(layer(q_proj=linear(), k_proj=linear(), **norms), {"attn": two})


def test_weights_that_are_not_their_own_are_refused():
    """Such as those of an adapter, or a parametrised weight."""
    module = nn.utils.parametrizations.weight_norm(linear())
    with pytest.raises(NotImplementedError, match="attn"):
        qk_clip(layer(q_proj=module, k_proj=linear()), {"attn": two})
