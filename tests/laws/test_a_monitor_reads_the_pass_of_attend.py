"""A model that computes by attend is monitored without a second pass: the same training, the same rows."""

import contextlib

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import gradlogz
from gradlogz.attention.in_models.head_summaries import sums_of
from gradlogz.attention.in_models.intercepted_calls import call_from_attend
from gradlogz.kernels.attention import operator
from support.architectures import ARCHITECTURES, outputs_of
from support.small_trainings import GPT, TOKENS, AttendAttention, batches, train

QUIET = gradlogz.attention.Thresholds(None, None, None)


def made(statistics, checkpointed=None):
    torch.manual_seed(0)
    model = GPT(checkpointed=checkpointed)
    for block in model.blocks:
        block.attention = AttendAttention(block.attention, statistics)
    return model.train()


@pytest.fixture
def passes(monkeypatch):
    """Calls of attention kernels, forward."""
    calls, forward = [], operator.dispatch.forward
    monkeypatch.setattr(operator.dispatch, "forward", lambda *a, **o: calls.append(o["statistics"]) or forward(*a, **o))
    return calls


@pytest.mark.parametrize("checkpointed", [None, False, True])
@pytest.mark.parametrize("statistics", ["scalar", "none", "moments"])
def test_the_training_is_the_same_to_the_last_bit(statistics, checkpointed):
    found = []
    for monitored in (False, True):
        model = made(statistics, checkpointed)
        torch.manual_seed(1)
        context = gradlogz.monitor(model, every=2, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context:
            losses = train(model, batches(4))
        weights = {name: t.clone() for name, t in model.state_dict().items()}
        found.append((losses, weights, torch.get_rng_state(), model.blocks[0].attention.result))
    (expected, weights, drawn, fields), (actual, same_weights, same_drawn, same_fields) = found
    assert actual == expected
    assert all(torch.equal(same_weights[name], weights[name]) for name in weights)
    assert torch.equal(drawn, same_drawn)
    assert [t is None for t in same_fields] == [t is None for t in fields], "the model gets the fields it asked for"


def test_no_attention_is_computed_twice(passes):
    counts = []
    for monitored in (False, True):
        model = made("scalar")
        passes.clear()
        context = gradlogz.monitor(model, every=1, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context as m:
            train(model, batches(3))
        counts.append(list(passes))
    assert counts[0] == counts[1] == [True] * 6
    assert [heads.rows for heads in m.row().layers.values()] == [3 * TOKENS] * 2


def test_without_statistics_the_model_keeps_its_own_output(passes):
    """Another kernel may compute it, with other last bits: the statistics are a second pass."""
    model = made("none")
    with gradlogz.monitor(model, every=1, thresholds=QUIET):
        train(model, batches(1))
    assert passes == [True, False] * 2


LAYERS = {
    "multihead": (lambda: gradlogz.MultiheadAttention(32, 2), lambda layer, x: layer(x, x, x, need_weights=False)[0]),
    "moment": (lambda: gradlogz.MomentAttention(32, 2), lambda layer, x: sum(layer(x, x.square()))),
    "mixture": (lambda: gradlogz.MixtureAttention(32, 2), lambda layer, x: layer(x)),
    "gated": (lambda: gradlogz.GatedHeads(32, 2), lambda layer, x: layer(x)),
    "link": (lambda: gradlogz.LinkAttention(32, 2, family="gaussian"), lambda layer, x: layer(x)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_package_are_monitored_without_a_second_pass(name, passes):
    build, call = LAYERS[name]
    counts, weights = [], []
    for monitored in (False, True):
        torch.manual_seed(0)
        layer = build()
        optimizer, x = torch.optim.SGD(layer.parameters(), 1e-2), torch.randn(3, 40, 32)
        passes.clear()
        context = gradlogz.monitor(layer, every=1, thresholds=QUIET)
        with context if monitored else contextlib.nullcontext() as m:
            for _ in range(2):
                call(layer, x).square().mean().backward()
                optimizer.step()
        counts.append(list(passes))
        weights.append([p.detach() for p in layer.parameters()])
        with torch.no_grad():
            call(layer, x)
        assert passes[-1] is False, "no statistics are computed where no gradient is"
    assert counts[0] == counts[1] == [True] * 2
    assert all(map(torch.equal, *weights))
    assert [heads.rows for heads in m.row().layers.values()] == [3 * 40]


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "window": {"window": (3, 1)},
    "causal window": {"window": (2, 0)},
    "segments": {"segments": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]]), "is_causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0]).double()},
    "padding": {"attn_mask": (torch.arange(9) < torch.tensor([9, 6, 4])[:, None])[:, None, None]},
    "left padding": {"attn_mask": (torch.arange(9) > torch.tensor([-1, 2, 4])[:, None])[:, None, None]},
    "added mask": {"attn_mask": torch.randn(1, 4, 7, 9, generator=torch.Generator().manual_seed(1)).double()},
    "bias": {"bias": torch.randn(7, 9, generator=torch.Generator().manual_seed(2)).double(), "is_causal": True},
    "everything": {
        "is_causal": True, "window": (5, 0), "softcap": 3.0, "scale": 0.4,
        "segments": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]] * 3),
    },
}  # fmt: skip


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_sums_are_those_of_a_separate_pass(name, key_heads):
    torch.manual_seed(0)
    query, key, value = drawn(3, 4, 7, 16), drawn(3, key_heads, 9, 16), drawn(3, key_heads, 9, 16)
    call = call_from_attend(query, key, value, enable_gqa=True, **OPTIONS[name])
    assert call.shows_its_statistics()
    expected, found = sums_of(call), sums_of(call, result=call.attend())
    for part, other_part in zip(found, expected, strict=True):
        for field in ("sums", "ends"):
            one, other = getattr(part, field), getattr(other_part, field)
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=lambda m, field=field: f"{field}: {m}")


REGISTERED = ["llama", "bert", "gemma2", "gpt_oss", "t5"]  # causal, padded, windows and soft caps, sinks, biases


@pytest.fixture
def registered(monkeypatch):
    """The implementation of transformers, with compiled kernels for small calls too: these have the statistics."""
    pytest.importorskip("numba")
    monkeypatch.setattr(operator.dispatch, "WORTH_COMPILING", 0)
    gradlogz.register()
    yield
    gradlogz.attention.unregister()


def train_architecture(architecture, implementation, padding, monitored):
    """Train two steps; return the parameters and the rows of the monitor."""
    model, inputs = architecture.build(implementation).train(), architecture.inputs(padding)
    optimizer, rows = torch.optim.SGD(model.parameters(), 1e-2), []
    context = gradlogz.monitor(model, every=1, thresholds=QUIET, writer=rows.append)
    with context if monitored else contextlib.nullcontext():
        for _ in range(2):
            sum(t.square().mean() for t in outputs_of(model, inputs).values()).backward()
            optimizer.step()
    return list(model.parameters()), rows


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_model_is_monitored_without_a_second_pass(name, padding, passes):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    parameters, _ = train_architecture(architecture, "gradlogz", padding, monitored=False)
    expected = list(passes)
    assert all(expected), "statistics are computed in every step"
    passes.clear()
    same_parameters, rows = train_architecture(architecture, "gradlogz", padding, monitored=True)
    assert passes == expected
    assert all(map(torch.equal, parameters, same_parameters))
    _, rows_of_eager = train_architecture(architecture, "eager", padding, monitored=True)
    for one, other in zip(rows[0].records(), rows_of_eager[0].records(), strict=True):
        assert (one.pop("layer"), one.pop("kind")) == (other.pop("layer"), other.pop("kind"))
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)


def test_a_causal_mask_of_torch_keeps_the_other_options():
    query, key = drawn(3, 4, 5, 16), drawn(3, 2, 9, 16)
    for mask in (causal_lower_right(5, 9), causal_upper_left(5, 9)):
        options = {"attn_mask": mask, "enable_gqa": True, "scale": 0.3, "dropout_p": 0.5}
        call = call_from_attend(query, key, key, **options)
        assert {"enable_gqa": True, "scale": 0.3, "dropout_p": 0.5}.items() <= call.options.items()
        torch.manual_seed(1)
        expected = gradlogz.attend(query, key, key, **options)
        torch.manual_seed(1)
        assert torch.equal(call.attend().output, expected.output)
