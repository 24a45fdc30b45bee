"""propagate, layer_dynamics, iterate_layer and simulate --model say what is wrong with a model, a text or an option."""

import functools

import torch
from torch import nn

from gradlogz import Ascent, GaussianCloud, evolve
from gradlogz.commands import simulate
from gradlogz.dynamics import LayerNorms, Rotation, TrainedHeads
from gradlogz.probing import iterate_layer, layer_clouds, layer_dynamics, propagate
from gradlogz.probing.inside.architecture import Architecture
from gradlogz.probing.inside.redrawn_models import RedrawnModels
from gradlogz.probing.propagation.layer_step import LayerDynamics
from support.error_form import each_of, refused
from support.planted.layers import PlantedAttention, PlantedLayer, known_layers
from support.tiny_models import tiny

F64 = torch.float64
IDS = torch.arange(60).reshape(6, 10) % 50
INPUTS = [{"input_ids": IDS}]


def heads(width=4, positions=None):
    W, b = torch.zeros(1, width, 2, dtype=F64), torch.zeros(1, 2, dtype=F64)
    one = torch.ones(positions or 1, 1, dtype=F64)
    rotation = None if positions is None else Rotation(torch.tensor([0]), torch.tensor([1]), one, 0 * one)
    return TrainedHeads(W, b, W, b, W, b, W.mT, torch.zeros(width, dtype=F64), rotation)


def quantised():
    """A layer with weights that are integers."""
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    return nn.Sequential(layer)


def cloud(*shape):
    return torch.ones(*shape, dtype=F64)


class Boxed(PlantedLayer):
    """A layer that reads its tokens in a list."""

    def forward(self, x):
        return super().forward(x[0])


class InBoxes(nn.Module):
    """A model whose layers read lists of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 8, dtype=F64), Boxed(8)

    def forward(self, input_ids):
        return self.layer([self.embedding(input_ids)])


class WithoutResiduals(nn.Module):
    """A model with attention and no residual connection."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(50, 8, dtype=F64), PlantedAttention(8)

    def forward(self, input_ids):
        return self.attention(self.embedding(input_ids))


@functools.cache
def model(kind, name):
    return tiny(kind, name)[:2]


def dynamics_of(kind, name):
    return layer_dynamics(*model(kind, name), 0)


def pushed(model=None, texts=INPUTS, **options):
    return propagate(known_layers() if model is None else model, None, texts, **({"seeds": 2, "tokens": 20} | options))


def step():
    return LayerDynamics("layer", Ascent(), LayerNorms(), "post", 3, 0.0)


ERRORS = [
    (ValueError, "evolve: heads", "W_v", lambda: evolve(cloud(3, 4), Ascent(heads=heads(), W_v=cloud(4, 4)), steps=1)),
    (ValueError, "evolve: heads", "beta", lambda: evolve(cloud(3, 4), Ascent(heads=heads(), beta=cloud(1)), steps=1)),
    (
        ValueError,
        "evolve: heads",
        "heads.key_bias",
        lambda: evolve(cloud(3, 4), Ascent(heads=heads()._replace(key_bias=cloud(7))), steps=1),
    ),
    (
        ValueError,
        "evolve: heads",
        "heads.value",
        lambda: evolve(cloud(3, 4), Ascent(heads=heads()._replace(value=cloud(2, 3, 2))), steps=1),
    ),
    (ValueError, "evolve: heads", "dimension 5", lambda: evolve(cloud(3, 5), Ascent(heads=heads()), steps=1)),
    (ValueError, "evolve: cloud", "positions", lambda: evolve(cloud(3, 4), Ascent(heads=heads(positions=2)), steps=1)),
    (
        TypeError,
        "GaussianCloud: ascent",
        "heads",
        lambda: GaussianCloud(cloud(4), torch.eye(4, dtype=F64)).evolve(Ascent(heads=heads())),
    ),
    (ValueError, "layer_dynamics: layer", "below 3", lambda: layer_dynamics(known_layers(), INPUTS[0], 3)),
    (ValueError, "layer_dynamics: layer", "parallel", lambda: dynamics_of("causal", "gpt_neox")),
    (ValueError, "layer_dynamics: layer", "normalises", lambda: dynamics_of("causal", "qwen3")),
    (ValueError, "layer_dynamics: layer", "soft cap", lambda: dynamics_of("causal", "gemma2")),
    (ValueError, "layer_dynamics: layer", "biases", lambda: dynamics_of("seq2seq", "t5")),
    (ValueError, "layer_dynamics: layer", "own logits", lambda: dynamics_of("causal", "bloom")),
    (ValueError, "layer_dynamics: layer", "neither full", lambda: dynamics_of("causal", "mistral")),
    (ValueError, "layer_dynamics: layer", "differs", lambda: dynamics_of("causal", "cohere")),
    (ValueError, "propagate: start", "gaussian", lambda: pushed(start="uniform")),
    (ValueError, "propagate: seeds", "at least 1", lambda: pushed(seeds=0)),
    (ValueError, "propagate: baselines", "redrawn", lambda: pushed(baselines=["trained"])),
    (
        ValueError,
        "propagate: baselines",
        "int8",
        lambda: RedrawnModels(quantised(), Architecture((), 2, ("0",), {}, frozenset()), {}),
    ),
    (ValueError, "propagate: texts", "windows", lambda: pushed(seeds=7)),
    (ValueError, "propagate: tokens", "width", lambda: pushed(tokens=9)),
    (ValueError, "propagate: model", "arguments", lambda: pushed(InBoxes(), baselines=())),
    (ValueError, "propagate: model", "residual", lambda: pushed(WithoutResiduals())),
    (
        ValueError,
        "propagate: model",
        "cross-attention",
        lambda: pushed(model("seq2seq", "bart")[0], [model("seq2seq", "bart")[1]], seeds=1),
    ),
    (ValueError, "layer_clouds: texts", "windows", lambda: layer_clouds(known_layers(), None, INPUTS, seeds=7)),
    (ValueError, "iterate_layer: steps", "at least 1", lambda: iterate_layer(step(), None, steps=0)),
    (ValueError, "simulate: --beta", "identity", lambda: simulate.command(model="minilm", beta=1.0)),
    (ValueError, "simulate: --steps", "--layer", lambda: simulate.command(model="minilm", steps=3)),
    (ValueError, "simulate: --start", "--model", lambda: simulate.command(start="sphere")),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)


def test_models_that_are_no_steps_can_still_be_pushed():
    """The remedy of layer_dynamics: propagate runs the layers of the model themselves."""
    for kind, name in (("causal", "gpt_neox"), ("causal", "gemma2"), ("causal", "mistral"), ("causal", "bloom")):
        network, inputs = model(kind, name)
        rows = [{k: t.repeat(4, 1) for k, t in inputs.items()}]
        result = propagate(network, None, rows, tokens=40, seeds=1, baselines=())
        assert bool(result.observed["sampled"]["radius"].isfinite().all())
