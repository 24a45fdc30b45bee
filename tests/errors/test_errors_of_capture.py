"""Capture and the probe say what they cannot see in a model, and what must be otherwise in a call."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from PIL import Image
from torch import nn

import gradlogz
from gradlogz._errors import InputRuntimeError
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.corpus.images import images
from gradlogz.probing.corpus.inputs import Inputs
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.memory_limits import check_memory
from gradlogz.probing.predictions import known_predictions
from support.architectures import ARCHITECTURES
from support.error_form import each_of, refused
from support.planted.matrices import gpt2, random_heads


class HiddenAttention(nn.Module):
    """Attention that nothing can see: its softmax is written out with exponentials."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        w = (self.q(x) @ self.k(x).mT).exp()
        return x + (w / w.sum(-1, keepdim=True)) @ x


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.unseen = nn.MultiheadAttention(8, 2, batch_first=True), HiddenAttention()

    def forward(self, x):
        return self.unseen(x + self.seen(x, x, x)[0])


PIXELS = SimpleNamespace(model_input_names=["pixel_values"])


def torn():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torn.png").write_bytes(b"no image")
        list(images(folder, PIXELS))


def large():
    with tempfile.TemporaryDirectory() as folder:
        Image.new("1", (9000, 9000)).save(Path(folder, "large.png"))
        list(images(folder, PIXELS))


def without_pillow():
    with mock.patch.dict(sys.modules, {"PIL": None}):
        list(images("/nowhere", PIXELS))


def bloom():
    return next(a for a in ARCHITECTURES if a.name == "bloom").build()


def planted(nan=False, fits=True, quantised=False):
    model = gpt2(0, lambda g, gain: random_heads(g), layers=1)
    layout = discover(model, {"input_ids": torch.tensor([[3, 4, 5]])})
    if nan:
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight[:, 8] = torch.nan
    if not fits:
        model.forward = _full
    if quantised:
        model.is_quantized, model.forward = True, _not_computed
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    return statistics_of(model, layout, Batch(inputs, torch.tensor([1]), 0, ["one"], torch.tensor([0])), [])


def wide(width):
    model = gpt2(0, lambda g, gain: random_heads(g), layers=1)
    layout = discover(model, {"input_ids": torch.tensor([[3, 4, 5]])})
    return check_memory(model, layout._replace(width=width), known_predictions(), baseline=True)


def _full(**given):
    raise torch.OutOfMemoryError("no")


def _not_computed(**given):
    raise NotImplementedError("no such operator")


x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
tokens = {"input_ids": torch.tensor([[3, 4, 5]])}

ERRORS = [
    (
        InputRuntimeError,
        "discover: model",
        "no attention",
        lambda: gradlogz.capture(nn.Linear(8, 8), {"input": x}),
    ),
    (
        InputRuntimeError,
        "capture: model",
        "intercepted",
        lambda: gradlogz.capture(Half(), {"x": x}),
    ),
    (
        ValueError,
        "Attended: arguments",
        "own logits",
        lambda: gradlogz.capture(bloom(), tokens).attention["transformer.h.0.self_attention"].query,
    ),
    (
        ValueError,
        "probe: baseline",
        "share",
        lambda: gradlogz.probe(nn.Linear(8, 8), None, ["text"], baseline=2.0),
    ),
    (
        ValueError,
        "probe: draws",
        "at least 2",
        lambda: gradlogz.probe(nn.Linear(8, 8), None, ["text"], draws=1),
    ),
    (
        ValueError,
        "probe: predictions",
        "luck",
        lambda: gradlogz.probe(nn.Linear(8, 8), None, ["text"], predictions=["luck"]),
    ),
    (
        TypeError,
        "probe: predictions",
        "Predictions",
        lambda: gradlogz.probe(nn.Linear(8, 8), None, ["text"], predictions=[tempfile]),
    ),
    (
        ValueError,
        "probe: model",
        "finite",
        lambda: planted(nan=True),
    ),
    (
        InputRuntimeError,
        "probe: length",
        "memory",
        lambda: planted(fits=False),
    ),
    (
        InputRuntimeError,
        "probe: model",
        "quantised",
        lambda: planted(quantised=True),
    ),
    (
        ValueError,
        "probe: predictions",
        "memory",
        lambda: wide(2**20),
    ),
    (
        ValueError,
        "images: folder",
        "folder",
        lambda: list(images("/nowhere", PIXELS)),
    ),
    (ValueError, "images: folder", "pixels", large),
    (
        ImportError,
        "images: pillow",
        "installed",
        lambda: without_pillow(),
    ),
    (
        ValueError,
        "images: folder",
        "readable",
        lambda: torn(),
    ),
    (
        ValueError,
        "probe: texts",
        "tensors",
        lambda: list(Inputs(["text"])),
    ),
    (
        ValueError,
        "probe: texts",
        "tensors",
        lambda: list(Inputs([{"x": torch.ones(2, 4)}, {"x": torch.ones(2, 4), "y": torch.ones(3)}])),
    ),
    (
        ValueError,
        "probe: texts",
        "inputs",
        lambda: list(Inputs([])),
    ),
]


@each_of(ERRORS)
def test_what_must_be_otherwise_is_said(refusal):
    refused(refusal)


def test_after_an_error_nothing_is_left_in_the_model():
    model = Half()
    for _ in range(2):
        try:
            gradlogz.capture(model, {"x": x})
        except RuntimeError:
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
