"""Redrawn models have the spectra of a model, head by head, and compute something else."""

import copy

import pytest
import torch
from torch import nn

from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.head_weights import HeadWeights
from gradlogz.probing.inside.redrawn_models import RedrawnModels
from gradlogz.probing.inside.weights import weights_of
from support.architectures import ARCHITECTURES
from support.tiny_models import output_of

NAMES = ("bert", "albert", "gpt2", "gpt_neox", "llama", "qwen3", "phi3", "t5")
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
CHOSEN = [BY_NAME[name] for name in NAMES if name in BY_NAME]


def known(model, inputs):
    architecture = discover(model, inputs)
    return architecture, weights_of(model, architecture, inputs)


def spectra(weights):
    """Singular values of W_q, W_k, W_v and W_o of every head."""
    found = {}
    for layer, each in weights.items():
        assert isinstance(each, HeadWeights), each
        for name in ("query", "key", "value", "output"):
            matrix = getattr(each, name)
            if matrix is not None:
                found[layer, name] = torch.linalg.svdvals(matrix)
    return found


@pytest.mark.parametrize("architecture", CHOSEN, ids=str)
def test_spectra_of_heads_are_kept_and_the_function_is_not(architecture):
    model, inputs = architecture.build(), architecture.inputs()
    before = copy.deepcopy(model.state_dict())
    layout, weights = known(model, inputs)
    expected, output = spectra(weights), output_of(model, inputs)
    drawn = RedrawnModels(model, layout, weights).draw(3)
    others = known(drawn, inputs)[1]
    for place, values in spectra(others).items():
        torch.testing.assert_close(values, expected[place], rtol=1e-4, atol=1e-5)
    for layer, each in weights.items():  # biases are kept, singular vectors are not
        torch.testing.assert_close(others[layer].query_bias, each.query_bias, rtol=1e-5, atol=1e-5)
        overlap = torch.nn.functional.cosine_similarity(others[layer].query.flatten(1), each.query.flatten(1), dim=-1)
        assert float(overlap.abs().max()) < 0.5
    assert float((output_of(drawn, inputs) - output).abs().max()) > 0.1 * float(output.abs().max())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_architectures_include_fused_rotary_shared_and_grouped_layers():
    assert len(CHOSEN) >= 6
    assert {"albert", "gpt2", "gpt_neox", "llama"} <= {str(each) for each in CHOSEN}


def test_norms_biases_and_embeddings_are_kept():
    architecture = BY_NAME["gpt2"]  # whose unembedding is its embedding
    model, inputs = architecture.build(), architecture.inputs()
    drawn = RedrawnModels(model, *known(model, inputs)).draw(0)
    other = dict(drawn.named_parameters())
    for name, parameter in model.named_parameters():
        kept = parameter.ndim < 2 or "wte" in name or "wpe" in name
        assert torch.equal(other[name], parameter) == kept, name
    assert drawn.lm_head.weight is drawn.transformer.wte.weight


def test_spectra_of_feed_forward_matrices_are_kept():
    architecture = BY_NAME["llama"]
    model, inputs = architecture.build(), architecture.inputs()
    drawn = RedrawnModels(model, *known(model, inputs)).draw(0)
    for one, other in zip(model.model.layers, drawn.model.layers, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            pair = [torch.linalg.svdvals(getattr(m.mlp, name).weight.detach()) for m in (one, other)]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_of_every_memory_layout_are_redrawn(layout):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.convolution = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=layout)

        def forward(self, x):
            x = x + self.attention(x, x, x)[0]
            return x + self.convolution(x.mT.unflatten(-1, (3, 3))).flatten(2).mT

    torch.manual_seed(0)
    model, inputs = Mixer(), {"x": torch.randn(2, 9, 8)}
    architecture, weights = known(model, inputs)
    before = model.convolution.weight.detach().clone()
    drawn = RedrawnModels(model, architecture, weights).draw(3).convolution.weight.detach()
    torch.testing.assert_close(*(torch.linalg.svdvals(W.flatten(1)) for W in (drawn, before)))
    assert float((drawn - before).norm() / before.norm()) > 0.5
    assert torch.equal(model.convolution.weight, before)


def test_draws_follow_from_their_seeds():
    architecture = BY_NAME["bert"]
    model, inputs = architecture.build(), architecture.inputs()
    layout, weights = known(model, inputs)
    models = RedrawnModels(model, layout, weights)
    one, other, same = (copy.deepcopy(models.draw(seed).state_dict()) for seed in (1, 2, 1))
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.allclose(one[name], other[name])


def test_singular_vectors_are_uniform():
    """E[u_i² u_j²] over the sphere of dimension d is 1 / (d (d + 2)), and (1 + 2 [i = j]) of it."""

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x):
            return self.layer(x)

    torch.manual_seed(0)
    model = Sequence().eval()
    inputs = {"x": torch.randn(2, 5, 8)}
    layout, weights = known(model, inputs)
    models = RedrawnModels(model, layout, weights)
    directions = []
    for seed in range(4000):
        block = models.draw(seed).layer.self_attn.in_proj_weight[:4].detach()  # the queries of the first head
        directions.append(torch.linalg.svd(block).Vh[0])
    u = torch.stack(directions).double().square()
    d = u.shape[-1]
    expected = (torch.ones(d, d) + 2 * torch.eye(d)) / (d * (d + 2))
    error = 4 * (u.unsqueeze(-1) * u.unsqueeze(-2)).std(0) / len(u) ** 0.5
    assert ((u.mT @ u / len(u) - expected).abs() < error).all()


def test_quantised_weights_are_refused():
    architecture = BY_NAME["gpt2"]
    model, inputs = architecture.build(), architecture.inputs()
    layout, weights = known(model, inputs)
    layer = model.transformer.h[0].mlp.c_fc
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="int8"):
        RedrawnModels(model, layout, weights)
