"""Distributions pass through layers as the layers are known to change them, and text as the probe reads it."""

import math

import pytest
import torch

from gradlogz.dynamics.contraction import moments_of
from gradlogz.probing import capture, iterate_layer, layer_clouds, layer_dynamics, propagate
from gradlogz.probing.corpus.inputs import Inputs
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.loading import load
from gradlogz.probing.propagation.initial_tokens import drawn, moments_of_text
from gradlogz.probing.propagation.layer_observables import in_range
from gradlogz.probing.propagation.layer_passes import passed
from support.planted.layers import known_layers
from support.scales import close
from support.tiny_models import tiny

F64 = torch.float64
LENGTH = 16


def batches(rows=24, batches=2, vocabulary=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, vocabulary, (rows, LENGTH), generator=generator)} for _ in range(batches)]


def pushed(model, **options):
    return propagate(model, None, batches(), **({"tokens": 200, "seeds": 2, "baselines": ()} | options))


# Planted layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["gaussian", "standard", "sphere", "text"])
def test_layers_without_values_change_nothing(start):
    result = pushed(known_layers(), start=start)
    assert result.depths == 4
    for series, columns in result.observed.items():
        for name in ("radius", "mean_fraction", "effective_rank", "kurtosis", "sliced_wasserstein", "clusters"):
            close(
                columns[name], columns[name][:, :1].expand(-1, 4), 1e3, tolerance=1e-9 if name == "kurtosis" else None
            )
        for name in ("expansion", "contraction", "displacement"):
            assert bool(columns[name][:, 0].isnan().all()), "no layer precedes the first depth"
            close(columns[name][:, 1:], torch.zeros(2, 3, dtype=F64))
        close(columns["entropy"][:, :3], torch.full((2, 3), math.log(LENGTH), dtype=F64), 10.0)
        close(columns["self_weight"][:, :3], torch.full((2, 3), 1 / LENGTH, dtype=F64))
        assert series in ("text", "sampled")


def test_a_linear_layer_changes_moments_by_its_matrix():
    generator = torch.Generator().manual_seed(1)
    F = torch.randn(8, 8, generator=generator, dtype=F64) / 4
    result = pushed(known_layers(feed_forward=F, layers=1), start="gaussian", seeds=1)
    sampled = result.observed["sampled"]
    model = known_layers(layers=1)
    stream = torch.cat([model.embedding(b["input_ids"]).flatten(0, 1) for b in by_group()])
    moments = moments_of_text(stream.detach())
    draws = torch.Generator().manual_seed(0)
    x = torch.cat([drawn("gaussian", len(b["input_ids"]) * LENGTH, moments, draws) for b in by_group()])[:200]
    y = x + x @ F
    (m, C), (_, before) = moments_of(y), moments_of(x)
    eigenvalues = torch.linalg.eigvalsh(C)
    p = eigenvalues / eigenvalues.sum()
    expected = {
        "radius": y.square().sum(-1).mean().sqrt(),
        "mean_fraction": m.square().sum() / y.square().sum(-1).mean(),
        "effective_rank": (-(p * p.log()).sum()).exp(),
        "expansion": torch.zeros((), dtype=F64),
        "contraction": (C.trace() / before.trace()).log(),
        "displacement": ((y - x).square().sum() / y.square().sum()).sqrt(),
    }
    for name, value in expected.items():
        close(sampled[name][0, 1], value, 10.0)
    close(sampled["kurtosis"][0, 1], sampled["kurtosis"][0, 0], 100.0)  # invariant to affine maps


def by_group():
    """The batches in the order in which inputs without a tokenizer are read."""
    return [batch.inputs for batch in Inputs(batches())]


def test_uniform_attention_expands_as_known():
    """x + c mean of the window: variances within windows stay, those of the means grow by (1 + c)²."""
    c = 0.5
    result = pushed(known_layers(value=c, layers=1), start="standard", seeds=1, tokens=24 * LENGTH)
    expansion = result.observed["sampled"]["expansion"][0, 1]
    draws = torch.Generator().manual_seed(0)
    moments = moments_of_text(torch.eye(8, dtype=F64))
    windows = torch.cat([
        drawn("standard", len(b["input_ids"]) * LENGTH, moments, draws).reshape(-1, LENGTH, 8) for b in by_group()
    ])[:24]  # fmt: skip
    after = windows + c * windows.mean(1, keepdim=True)
    spread = [x.flatten(0, 1).var(0, correction=0).sum() for x in (windows, after)]
    close(expansion, (spread[1] / spread[0]).log())
    assert float(expansion) > 0.01


# Text and seeds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("masked", "bert"), ("causal", "llama")])
def test_the_text_is_the_stream_of_the_probe(kind, name):
    model, inputs, _ = tiny(kind, name)
    architecture = discover(model, inputs)
    batch = next(Inputs([inputs]))
    captured = capture(model, batch.inputs, statistics="scalar")
    depths, shape = passed(model, architecture, batch)
    real = batch.inputs["attention_mask"].bool() if "attention_mask" in batch.inputs else None
    layers = [s for s in captured.sublayers.values() if s.sublayer.kind == "attention"]
    assert len(depths) == len(layers) + 1
    assert shape == tuple(layers[0].stream.shape)
    for depth, layer in zip(depths, layers, strict=False):
        for tokens, expected in ((depth.stream, layer.stream), (depth.ascended, layer.after)):
            assert torch.equal(tokens, expected.flatten(0, 1) if real is None else expected[real])
    entered, _ = passed(model, architecture, batch, layers[0].stream)
    for depth, again in zip(depths, entered, strict=True):
        assert torch.equal(depth.stream, again.stream), "the text's own tokens, put in, change nothing"
    other, _ = passed(model, architecture, batch, layers[0].stream.flip(1))
    assert not torch.equal(other[-1].stream, depths[-1].stream)


def test_seeds_reproduce_and_differ():
    model = known_layers(value=0.5, query=1.0)
    one, again, other = (pushed(model, seed=seed) for seed in (0, 0, 7))
    for series in one.observed:
        for name, values in one.observed[series].items():
            assert torch.equal(values.nan_to_num(), again.observed[series][name].nan_to_num())
    assert not torch.equal(one.observed["sampled"]["radius"], other.observed["sampled"]["radius"])
    assert not torch.equal(one.observed["sampled"]["radius"][0], one.observed["sampled"]["radius"][1])


def test_sampled_tokens_have_the_moments_they_name():
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(500, 4, generator=generator, dtype=F64) @ torch.randn(4, 4, generator=generator, dtype=F64) + 2.0
    moments, n = moments_of_text(text), 40_000
    mean, covariance = moments_of(text)
    x = drawn("gaussian", n, moments, generator)
    sigma = covariance.diagonal().max()
    close(x.mean(0), mean, float(sigma.sqrt()), tolerance=5 / math.sqrt(n))
    close(moments_of(x)[1], covariance, float(sigma), tolerance=7 / math.sqrt(n))
    close(moments_of(drawn("standard", n, moments, generator))[1], torch.eye(4, dtype=F64), tolerance=7 / math.sqrt(n))
    sphere = drawn("sphere", n, moments, generator)
    radius = text.square().sum(-1).mean().sqrt()
    close(sphere.norm(dim=-1), radius.expand(n), float(radius))
    close(sphere.mean(0), torch.zeros(4, dtype=F64), float(radius), tolerance=5 / math.sqrt(n))


def test_the_range_of_a_cloud_leaves_rounding_out():
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(300, 5, generator=generator) @ torch.randn(5, 12, generator=generator) + 3.0  # float32: rounding
    inside = in_range(flat.double(), torch.finfo(torch.float32).eps)
    assert inside.shape == (300, 5)
    close(torch.linalg.eigvalsh(moments_of(inside)[1]), torch.linalg.eigvalsh(moments_of(flat.double())[1])[-5:], 100.0)


# Baselines and one layer ----------------------------------------------------------------------------------------------


def test_baselines_read_the_same_tokens_with_other_weights():
    model, _, _ = tiny("masked", "bert")
    inputs = [{"input_ids": b["input_ids"]} for b in batches(vocabulary=60)]
    result = propagate(model, None, inputs, tokens=100, seeds=2)
    assert tuple(result.observed) == ("text", "sampled", "untrained", "redrawn")
    ranks = {series: columns["effective_rank"] for series, columns in result.observed.items()}
    for other in ("untrained", "redrawn"):
        assert torch.equal(ranks["sampled"][:, 0], ranks[other][:, 0])
        assert not torch.allclose(ranks["sampled"][:, 1], ranks[other][:, 1], rtol=1e-4)
    alone = propagate(model, None, inputs, tokens=100, seeds=2, start="text")
    assert tuple(alone.observed) == ("text", "untrained", "redrawn")
    assert torch.equal(alone.observed["text"]["effective_rank"], ranks["text"])


def test_the_first_repetition_of_a_layer_is_the_next_layer_of_the_text():
    model, _, _ = tiny("masked", "bert")
    model = model.double()
    model.set_attn_implementation("sdpa")
    inputs = [{"input_ids": b["input_ids"]} for b in batches(rows=3, vocabulary=60)]
    clouds = layer_clouds(model, None, inputs, layer=0, seeds=2, tokens=40)
    repeated = iterate_layer(layer_dynamics(model, clouds.inputs, 0), clouds, steps=3)
    assert repeated.times == (0, 1, 2, 3)
    for i, cloud in enumerate(clouds.clouds["text"]):
        captured = capture(model, {"input_ids": row_with(inputs, cloud, model)})
        streams = [s.stream for s in captured.sublayers.values() if s.sublayer.kind == "attention"]
        radii = torch.stack([x[0].square().sum(-1).mean().sqrt() for x in streams[:2]])
        close(repeated.observed["text"]["radius"][i, :2], radii, 10.0)
    assert set(repeated.observed) == {"text", "sampled"}
    long = iterate_layer(layer_dynamics(model, clouds.inputs, 0), clouds, steps=103)
    assert long.times[-2:] == (102, 103)


def row_with(inputs, cloud, model):
    """The window whose tokens enter the layers as this cloud."""
    for batch in inputs:
        for row in batch["input_ids"]:
            stream = next(iter(capture(model, {"input_ids": row[None]}).sublayers.values())).stream
            if torch.allclose(stream[0], cloud):
                return row[None]
    raise AssertionError("no window has these tokens")


@pytest.mark.long
def test_a_pretrained_model_keeps_its_start_gaussian():
    loaded = load("minilm", device="cpu")
    result = propagate(loaded.model, loaded.tokenizer, None, seeds=2, tokens=600)
    assert result.depths == 7
    null = result.null["sliced_wasserstein"]
    assert null[0] < result.estimate("sampled", "sliced_wasserstein", 0).value < 1.1 * null[2]
