"""observe, monitor and register say what they cannot see, and what they were given."""

import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from gradlogz import monitor, observe, register
from gradlogz.attention import unregister
from gradlogz.attention.in_models import process_check
from gradlogz.attention.in_models.intercepted_calls import call_from_interface
from support.architectures import ARCHITECTURES
from support.error_form import each_of, refused
from support.small_trainings import GPT, Encoder, batches, train

ids = batches(1)[0]
q = torch.randn(1, 2, 3, 4)


class HiddenAttention(nn.Module):
    """Attention that is no softmax of torch's."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        s = (self.query(x) @ self.key(x).mT).exp()
        return (s / s.sum(-1, keepdim=True)) @ x


class Own(nn.MultiheadAttention):
    """Torch's layer, called otherwise, under another name."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class PooledAttention(nn.Module):
    """Torch's function on the weights of a layer that is not called."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        a = self.inner
        return nn.functional.multi_head_attention_forward(
            x, x, x, 4, 2, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0, a.out_proj.weight, a.out_proj.bias
        )[0]


def small(name, implementation="eager"):
    return next(a for a in ARCHITECTURES if a.name == name).build(implementation)


def run(context, model, *given):
    with context:
        return model(*given)


def twice():
    model = GPT()
    with observe(model), observe(model):
        pass


def stacked(statistic):
    model = GPT()
    with observe(model) as seen:
        model(ids)
    return seen.stack(statistic)


def of_unlike_layers():
    architecture = next(a for a in ARCHITECTURES if a.name == "bart")
    model = architecture.build()
    with observe(model) as seen:
        model(**architecture.inputs())
    return seen.stack("entropy")


def early():
    with monitor(GPT()) as m:
        m.row()


def no_attention():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    with monitor(model, every=1):
        train(model, batches(1))


def missed_in_training():
    model = nn.Sequential(HiddenAttention())
    with monitor(model, every=1):
        model(torch.randn(2, 3, 4))


def frozen():
    model = Encoder().eval().requires_grad_(False)
    with monitor(model):
        model(ids)


def many_at_once(context):
    model = GPT()
    with context(model):
        torch.func.vmap(lambda each: model.eval()(each[None]))(ids)


def split_by_heads():
    """As tensor parallelism leaves a layer in one of two processes; a process group is needed to split it."""
    model = GPT()
    model.blocks[0].attention.qkv.weight.placements = (Shard(0),)
    with mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: 2):
        run(monitor(model), None)


def without_the_others():
    """In one of two processes, of which the other does not monitor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1]),
            mock.patch.object(process_check, "PATIENCE", timedelta(milliseconds=50)),
        ):
            run(monitor(GPT()), None)
    finally:
        dist.destroy_process_group()


def captured():
    """As inside the capture of a CUDA graph."""
    model = GPT()
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True), monitor(model) as m:
        m._device = torch.device("cuda")
        model(ids)


def checkpointed():
    model = GPT()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            anchor = torch.ones(1, requires_grad=True)
            return checkpoint(lambda y, _: self.model(y), x, anchor, use_reentrant=True)

    with observe(outer := Checkpointed()) as observed:
        outer(ids)
    observed.stack("entropy").mean().backward()


def without_transformers():
    with mock.patch.dict(sys.modules, {"transformers.modeling_utils": None}):
        register()


def sparse():
    return call_from_interface("gradlogz", nn.Identity(), q, q, q, None, block_indices=torch.zeros(1, 2))


def of_foreign_mask():
    return call_from_interface("flex_attention", nn.Identity(), q, q, q, SimpleNamespace(shape=(1, 1, 3, 3)))


ERRORS = [
    (TypeError, "observe: model", "a torch.nn.Module", lambda: run(observe("bert"), None)),
    (
        RuntimeError,
        "observe: model",
        "observed",
        twice,
    ),
    (
        RuntimeError,
        "observe: model",
        "compute attention",
        lambda: run(observe(model := nn.Sequential(nn.Linear(4, 4))), model, torch.randn(2, 4)),
    ),
    (
        RuntimeError,
        "observe: model",
        "intercepted",
        lambda: run(observe(model := nn.Sequential(HiddenAttention())), model, torch.randn(2, 3, 4)),
    ),
    (
        ValueError,
        "Observation.stack: statistic",
        "Attention",
        lambda: stacked("weights"),
    ),
    (
        ValueError,
        "Observation.stack: statistic",
        "entropy",
        of_unlike_layers,
    ),
    (TypeError, "monitor: model", "a torch.nn.Module", lambda: run(monitor(None), None)),
    (
        TypeError,
        "monitor: model",
        "thread",
        lambda: run(monitor(nn.DataParallel(GPT())), None),
    ),
    (ValueError, "monitor: group", "tensor parallelism", split_by_heads),
    (RuntimeError, "monitor: group", "ranks [1]", without_the_others),
    (NotImplementedError, "monitor: model", "CUDA graph", captured),
    (
        ValueError,
        "monitor: every",
        "positive",
        lambda: run(monitor(GPT(), every=0), None),
    ),
    (
        TypeError,
        "monitor: writer",
        "add_scalar",
        lambda: run(monitor(GPT(), writer="runs/1"), None),
    ),
    (
        RuntimeError,
        "monitor.row: None",
        "ended",
        early,
    ),
    (RuntimeError, "monitor: model", "compiled", no_attention),
    (RuntimeError, "monitor: model", "intercepted", missed_in_training),
    (
        RuntimeError,
        "monitor: model",
        "fused",
        frozen,
    ),
    (
        NotImplementedError,
        "monitor: model",
        "outside",
        lambda: many_at_once(monitor),
    ),
    (
        NotImplementedError,
        "observe: model",
        "outside",
        lambda: many_at_once(observe),
    ),
    (RuntimeError, "observe: model", "reentrant", checkpointed),
    (ImportError, "register: transformers", "installed", without_transformers),
    (TypeError, "register: model", "transformers", lambda: register(GPT())),
    (
        NotImplementedError,
        "register: model",
        "transformers",
        lambda: register(small("bloom")),
    ),
    (
        NotImplementedError,
        "attend: block_indices",
        "block_indices=",
        sparse,
    ),
    (
        TypeError,
        "attend: attention_mask",
        "tensor",
        of_foreign_mask,
    ),
]


@pytest.fixture(autouse=True)
def unregistered():
    yield
    unregister()


@each_of(ERRORS)
def test_what_cannot_be_seen_is_refused(refusal):
    refused(refusal)


@pytest.mark.parametrize("hidden", [Own(4, 2), PooledAttention(), nn.Sequential(HiddenAttention())])
def test_a_layer_between_others_is_missed_once(hidden):
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8), hidden, nn.TransformerEncoderLayer(4, 2, 8))
    name = "1.0" if isinstance(hidden, nn.Sequential) else "1"
    for context in (observe, monitor):
        with pytest.raises(RuntimeError, match=rf" {name}\b.* Pass"):
            run(context(model), model, torch.randn(5, 2, 4))


def test_layers_without_a_statistic_are_not_stacked():
    with pytest.raises(ValueError, match="key_mean must have one shape"):
        stacked("key_mean")


def test_a_missed_layer_may_be_allowed():
    model = nn.Sequential(HiddenAttention())
    with observe(model, strict=False) as seen, monitor(model, every=1, strict=False) as m:
        model(torch.randn(2, 3, 4))
        m.step()
    assert len(seen) == 0
    assert m.steps == 1


def test_a_pattern_leaves_layers_out():
    model = nn.Sequential(nn.Embedding(50, 4), HiddenAttention(), nn.TransformerEncoderLayer(4, 2, 8))
    with observe(model, layers="Multihead") as seen:
        model(ids)
    assert list(seen) == ["2.self_attn"]
