"""A monitored training is the same training, to the last bit; the rows are what its attention says."""

import contextlib
import copy
import socket

import pytest
import torch
import torch.multiprocessing

import gradlogz
from gradlogz.attention.in_models import head_summaries as rows
from gradlogz.attention.in_models.intercepted_calls import call_from_attend, logits_from_softmax
from gradlogz.attention.in_models.interception import _interceptions, _original
from support.architectures import ARCHITECTURES
from support.small_trainings import GPT, TOKENS, Encoder, batches, lonely_rank, monitored_rank, train
from support.wrapped_trainings import ORDERS, wrapped_rank

QUIET = gradlogz.attention.Thresholds(None, None, None)
MODELS = {
    "a script": lambda: GPT(),
    "checkpoints": lambda: GPT(checkpointed=False),
    "reentrant checkpoints": lambda: GPT(checkpointed=True),
    "torch's layers": lambda: Encoder(),
}


class Logits(torch.nn.Module):
    """A Hugging Face model that returns its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, attention_mask=(ids != 0).long()).logits


for _name in ("gpt2", "bert", "gemma2", "t5", "bloom", "albert"):
    _architecture = next(a for a in ARCHITECTURES if a.name == _name)
    for _implementation in _architecture.implementations:
        if _name != "t5":
            MODELS[f"{_name} {_implementation}"] = lambda a=_architecture, i=_implementation: Logits(a.build(i).train())


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def state(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_bit_identical(name, every):
    found = []
    for monitored in (False, True):
        model = made(name)
        torch.manual_seed(1)
        context = gradlogz.monitor(model, every=every, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context:
            losses = train(model, batches(4))
        found.append((losses, state(model), torch.get_rng_state()))
    (expected, weights, drawn), (actual, same_weights, same_drawn) = found
    assert actual == expected
    assert all(torch.equal(same_weights[k], weights[k]) for k in weights)
    assert torch.equal(drawn, same_drawn), "no random number was drawn"


@pytest.mark.parametrize("name", ["a script", "gpt2 sdpa"])
def test_autocast_and_accumulated_gradients_are_bit_identical(name):
    found, counted = [], []
    for monitored in (False, True):
        model = made(name)
        torch.manual_seed(1)
        context = gradlogz.monitor(model, every=1, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context as m, torch.autocast("cpu", torch.bfloat16):
            found.append(train(model, batches(6), accumulate=3))
        if monitored:
            counted = [heads.rows for heads in m.row().layers.values()]
            assert m.steps == 2
    assert found[0] == found[1]
    assert counted == [3 * 3 * TOKENS] * 2, "three passes of three sequences are one row"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler looks at it
@pytest.mark.parametrize("how", ["wrapped", "in place", "a block", "forward", "forward of a block"])
def test_a_compiled_model_is_bit_identical(how):
    found = []
    for monitored in (False, True):
        torch._dynamo.reset()
        model = made("a script")
        call = model
        if how == "wrapped":
            call = torch.compile(model, backend="aot_eager")
        elif how == "in place":
            model.compile(backend="aot_eager")
        elif how == "a block":
            model.blocks[0].compile(backend="aot_eager")
        else:
            part = model if how == "forward" else model.blocks[0]
            part.forward = torch.compile(part.forward, backend="aot_eager")
        torch.manual_seed(1)
        context = gradlogz.monitor(call, every=2, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context as m:
            losses = train(model, batches(4), call=call)
        found.append((losses, state(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][k], found[1][1][k]) for k in found[0][1]), "buffers too"
    assert list(m.row().layers) == ["blocks.0.attention", "blocks.1.attention"]
    assert [h.rows for h in m.row().layers.values()] == [3 * TOKENS] * 2


class MaskedAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x, mask):
        q, k = (p(x).unflatten(-1, (4, 4)).transpose(1, 2) for p in (self.query, self.key))
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch_adds_no_rows(masked):
    """As where a router sends no token to an expert: alone a row without numbers, beside another pass no change."""
    layer = MaskedAttention()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def run(size):
        mask = torch.ones(size, 1, 1, 5, dtype=torch.bool) if masked else None
        layer(torch.randn(size, 5, 16), mask).sum().backward()

    with gradlogz.monitor(layer, every=1, thresholds=QUIET) as m:
        run(0)
        optimizer.step()
        assert (m.row().layers[""].rows, m.row().alerts) == (0, ())
        run(0)
        run(3)
        optimizer.step()
    assert m.row().layers[""].rows == 3 * 5
    assert bool(m.row().layers[""].entropy.mean.isfinite().all())


def test_recomputed_checkpoints_are_counted_once():
    expected = None
    for name in ("a script", "checkpoints", "reentrant checkpoints"):
        model = made(name)
        torch.manual_seed(1)
        with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
            train(model, batches(1))
        records = m.row().records()
        assert {r["rows"] for r in records} == {3 * TOKENS}
        expected = expected or records
        assert records == expected


def test_a_row_is_what_the_weights_say():
    """Against the weights that the model returns, padding left out."""
    architecture = next(a for a in ARCHITECTURES if a.name == "bert")
    for side in ("right", "left"):
        model, inputs = architecture.build("eager").train(), architecture.inputs(side)
        weights = model(**inputs, output_attentions=True).attentions
        with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
            model(**inputs)
            m.step()
        kept = inputs["attention_mask"].bool()
        first = kept.int().argmax(-1)
        for p, heads in zip(weights, m.row().layers.values(), strict=True):
            rows_of_heads = p.detach().double().transpose(0, 1)[:, kept]  # [h, rows, n]
            entropy = -torch.special.xlogy(rows_of_heads, rows_of_heads).sum(-1)
            sink = torch.stack([p[i, :, :, f].detach() for i, f in enumerate(first)]).transpose(0, 1)[:, kept]
            for actual, expected in ((heads.entropy, entropy), (heads.sink, sink.double())):
                torch.testing.assert_close(actual.mean, expected.mean(-1), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(actual.least, expected.amin(-1), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(actual.greatest, expected.amax(-1), rtol=1e-5, atol=1e-5)
            assert heads.rows == int(kept.sum())


@pytest.mark.parametrize("masked", [False, True])
def test_padding_of_torchs_layers_is_left_out(masked):
    """torch hands its masks on as numbers."""
    model, ids = Encoder(0.0), batches(1)[0]
    ids[1, 8:] = 0
    mask = torch.zeros(TOKENS + 1, TOKENS + 1, dtype=torch.bool) if masked else None
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        model.encoder(model.embedding(ids), mask, src_key_padding_mask=ids == 0)
        m.step()
    assert [h.rows for h in m.row().layers.values()] == [int((ids != 0).sum())] * 2


def test_padded_keys_of_cross_attention_leave_no_query_out():
    """Also when there are as many queries as keys; the first key is the first that is no padding."""
    architecture = next(a for a in ARCHITECTURES if a.name == "bart")
    model, inputs = architecture.build("eager").train(), architecture.inputs("left")
    inputs["decoder_input_ids"] = inputs["input_ids"].clone()
    weights = model(**inputs, output_attentions=True).cross_attentions
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        model(**inputs)
        m.step()
    first = inputs["attention_mask"].argmax(-1)
    crossing = [heads for name, heads in m.row().layers.items() if "encoder_attn" in name]
    for p, heads in zip(weights, crossing, strict=True):
        sink = torch.stack([p[i, :, :, f].detach() for i, f in enumerate(first)]).double()
        assert heads.rows == sink[:, 0].numel()
        torch.testing.assert_close(heads.sink.mean, sink.mean((0, 2)), rtol=1e-5, atol=1e-5)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "a window": {"is_causal": True, "window": (2, 0)},
    "a mask": {"attn_mask": torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.3},
    "a padding mask": {"attn_mask": (torch.arange(9) < torch.tensor([[9], [6]]))[:, None, None]},
    "left padding": {"attn_mask": (torch.arange(9) >= torch.tensor([[0], [4]]))[:, None, None], "is_causal": True},
    "an added mask": {"attn_mask": torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(1))},
    "a bias": {"bias": torch.randn(9, 9, generator=torch.Generator().manual_seed(2))},
    "a soft cap and scale": {"softcap": 0.7, "scale": 0.9},
    "documents": {"segments": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_weight_of_the_first_key_is_that_of_attention(name):
    """Against the softmax of the logits, which attention to each key alone gives."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, h, 9, 8, generator=generator) for h in (4, 2))
    call = call_from_attend(q, k, k, **OPTIONS[name], enable_gqa=True)
    found = call.statistics()
    weight = call.sink_weights(found.log_normalizer, call.visible_keys()).first_key
    unit = torch.eye(9).expand(2, 2, 9, 9)
    weights = gradlogz.attend(q, k, unit, **OPTIONS[name], enable_gqa=True).output
    first = {"left padding": [[0] * 9, [4] * 9], "documents": [[0, 0, 0, 3, 3, 3, 3, 7, 7]] * 2}.get(
        name, [[0] * 9] * 2
    )
    torch.testing.assert_close(
        weight, weights.gather(-1, torch.tensor(first)[:, None, :, None].expand(2, 4, 9, 1))[..., 0]
    )
    torch.testing.assert_close(found.entropy, gradlogz.attend(q, k, k, **OPTIONS[name], enable_gqa=True).entropy)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 4, 3, 5, 8)])
def test_calls_with_any_number_of_dimensions_have_rows(shape):
    q = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    heads = rows.Transfer({"": rows.sums_of(call_from_attend(q, q, q))}).heads({})[""]
    expected = gradlogz.attend(q, q, q).entropy.reshape(-1, 3 if len(shape) > 2 else 1, 5)
    torch.testing.assert_close(heads.entropy.mean.float(), expected.mean((0, 2)))
    assert heads.rows == expected[:, 0].numel()


def test_one_batch_of_keys_for_many_of_queries_has_rows():
    q, k = torch.randn(3, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = (torch.arange(5) < torch.tensor([[5], [3], [4]]))[:, None, None]
    for call in (call_from_attend(q, k, k, attn_mask=mask), call_from_attend(k, q, q, attn_mask=mask)):
        assert rows.Transfer({"": rows.sums_of(call)}).heads({})[""].rows == 12


def test_passes_without_gradients_are_not_looked_at():
    model = made("a script")
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        with torch.no_grad():
            model(batches(1, size=7)[0][:, :-1])
        train(model, batches(1))
    assert [h.rows for h in m.row().layers.values()] == [3 * TOKENS] * 2


def test_evaluation_of_fused_layers_is_bit_identical():
    """torch computes its layers otherwise where there are hooks."""
    model, ids = made("torch's layers").eval(), batches(1)[0]
    with torch.no_grad():
        expected = model(ids)
        with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
            assert torch.equal(model(ids), expected)
            with torch.enable_grad():
                train(model.train(), batches(1))
    assert len(m.row().layers) == 2, "and the next pass is seen"


def test_a_layer_of_torchs_alone_is_watched_after_its_evaluation():
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    with gradlogz.monitor(layer, every=1, thresholds=QUIET) as m:
        with torch.no_grad():
            layer(x, x, x)
        layer(x, x, x)
        m.step()
    assert m.row().layers[""].rows == 10


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_not_a_number_is_reported(written, masked):
    """In one row of many; to leave it out would be to hide it."""
    q = torch.randn(2, 3, 5, 8)
    q[1, 0, 2, 0] = torch.nan
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool) if masked else None
    call = (
        logits_from_softmax(torch.nn.Identity(), q @ q.mT)
        if written
        else call_from_attend(q, torch.randn(q.shape), q, attn_mask=mask)
    )
    heads = rows.Transfer({"": rows.sums_of(call)}).heads({})[""]
    assert heads.rows == 10
    for extremes in heads[:5]:
        assert bool(extremes.mean[0].isnan()), "the head that has it"


def test_a_step_without_numbers_does_not_hide_a_collapse():
    model, alerts = made("a script"), []
    thresholds = gradlogz.attention.Thresholds(logit=None, sink=None)
    with gradlogz.monitor(model, every=1, thresholds=thresholds, on_alert=alerts.append) as m:
        for factor in (1.0, torch.nan, 100.0):
            other = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                model.blocks[1].attention.qkv.weight.mul_(factor)
            model(batches(1)[0])
            m.step()
            model.load_state_dict(other)
    expected = [("NaN", "blocks.1.attention", 1), ("entropy collapse", "blocks.1.attention", 2)]
    assert [(a.kind, a.layer, a.step) for a in alerts] == expected


def test_a_frozen_layer_is_watched_where_torch_does_not_fuse():
    model, ids = made("torch's layers").eval().requires_grad_(False), batches(1)[0]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = model(ids)
        with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
            assert torch.equal(model(ids), expected)
            m.step()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert len(m.row().layers) == 2


class BentAttention(torch.nn.Module):
    """A compiled function, and no weights that would make it a layer of attention."""

    def __init__(self):
        super().__init__()
        self.bent = torch.compile(lambda x: torch.softmax(x, -1) * 2.0, backend="aot_eager", fullgraph=True)

    def forward(self, x):
        return self.bent(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler looks at it
def test_a_compiled_function_inside_a_model_stays_one_graph():
    torch._dynamo.reset()
    found = []
    for monitored in (False, True):
        model = made("a script")
        model.blocks.append(BentAttention())
        torch.manual_seed(1)
        context = gradlogz.monitor(model, every=2, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context as m:
            found.append(train(model, batches(3)))
    assert found[0] == found[1]
    assert list(m.row().layers) == ["blocks.0.attention", "blocks.1.attention"]


@pytest.mark.parametrize("how", ["wrapped", "in place", "a block"])
def test_a_copy_of_a_compiled_model_is_a_model_of_its_own(how):
    """As averages of weights are kept, begun in a step that is looked at."""
    model, ids = made("a script").eval(), batches(1)[0]
    call = torch.compile(model, backend="eager") if how == "wrapped" else model
    if how != "wrapped":
        (model if how == "in place" else model.blocks[0]).compile(backend="eager")
    with gradlogz.monitor(call, every=1, thresholds=QUIET, strict=False):
        other = copy.deepcopy(call)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
    with torch.no_grad():
        assert not other(ids).any()
        assert call(ids).any()


class Rotated(torch.nn.Module):
    """A model whose graph saves a buffer."""

    def __init__(self):
        super().__init__()
        self.model = GPT(dropout=0.0)
        self.register_buffer("angle", torch.rand(50))

    def forward(self, ids):
        return self.model(ids) * self.angle


def test_two_passes_of_a_compiled_model_before_one_backward():
    """What the pass of the monitor left as it was it must not write to: autograd would refuse."""
    torch._dynamo.reset()
    model = Rotated().train()
    model.compile(backend="aot_eager")
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        sum(model(ids).square().mean() for ids in batches(2)).backward()
        m.step()
    assert float(model.model.seen) == 2, "buffers that a pass writes are written once"


def test_steps_are_those_of_the_first_optimizer_of_the_model():
    model, other = made("a script"), made("a script")
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        train(other, batches(3))
        assert m.steps == 0
        seen = []
        half = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
        first, second = (torch.optim.SGD(parameters, 1e-3) for parameters in half)
        for ids in batches(3):
            model(ids).sum().backward()
            first.step()
            second.step()
            seen.append(m.row().step)
    assert seen == [0, 1, 2]
    assert m.steps == 3


class Crash(torch.nn.Module):
    """The user ends it all."""

    def forward(self, *args, **kwargs):
        raise KeyboardInterrupt


# What is left behind -------------------------------------------------------------------------------------------------


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_is_installed_between_the_steps_that_are_looked_at():
    model, seen = made("a script"), []
    with gradlogz.monitor(model, every=3, thresholds=QUIET):
        assert hooks(model) > 0
        train(model, batches(5), after=lambda: seen.append((hooks(model) > 0, bool(_interceptions))))
    assert seen == [(False, False), (False, False), (True, True), (False, False), (False, False)]
    assert hooks(model) == 0


@pytest.mark.parametrize("name", ["a script", "gpt2 sdpa"])
def test_a_crash_inside_the_loop_leaves_nothing_behind(name):
    from transformers.modeling_utils import AttentionInterface

    model, before = made(name), AttentionInterface.get_interface
    forward = model.forward

    def loop():
        with gradlogz.monitor(model, every=1, thresholds=QUIET):
            train(model, batches(1))
            model.add_module("head" if name == "a script" else "model", Crash())
            model(batches(1)[0])

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert hooks(model) == 0
    assert not _interceptions
    assert not _original
    assert AttentionInterface.get_interface is before
    assert model.forward == forward
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap
@pytest.mark.parametrize("model", [torch.nn.MultiheadAttention(8, 2, batch_first=True), Encoder(0.0)])
@pytest.mark.parametrize("how", ["frozen", "many at once"])
def test_a_refusal_leaves_the_pass(model, how):
    """What is computed afterwards inside the context, and outside the model, is not taken for attention."""
    model = copy.deepcopy(model).eval().requires_grad_(how != "frozen")
    given = [torch.randn(2, 5, 8)] * 3 if isinstance(model, torch.nn.MultiheadAttention) else [batches(1)[0]]
    call = (
        model if how == "frozen" else torch.func.vmap(lambda *each: model(*(t[None] for t in each)), randomness="same")
    )
    with gradlogz.monitor(model, every=1, thresholds=QUIET):
        with pytest.raises((RuntimeError, NotImplementedError), match="monitor: "):
            call(*given)
        assert torch.overrides._get_current_function_mode() is None
    assert hooks(model) == 0


def test_two_monitors_and_an_observer_see_the_same():
    model = made("gpt2 sdpa")
    outer, inner = (gradlogz.monitor(model, every=1, thresholds=QUIET) for _ in range(2))
    first, second = outer.__enter__(), inner.__enter__()
    train(model, batches(1))
    assert first.row().records() == second.row().records()
    outer.__exit__(None, None, None)  # not in the order of nesting
    with gradlogz.observe(model) as seen:
        train(model, batches(1))
    inner.__exit__(None, None, None)
    observed = torch.stack([a.entropy.mean((0, 2)) for a in seen.values()]).detach().double()
    found = torch.stack([h.entropy.mean for h in second.row().layers.values()])
    torch.testing.assert_close(found, observed, rtol=1e-5, atol=1e-6)
    assert hooks(model) == 0


# Alerts and writers --------------------------------------------------------------------------------------------------


def test_a_collapse_is_reported_once():
    model, alerts = made("a script"), []
    with gradlogz.monitor(model, every=1, on_alert=alerts.append) as m:
        train(model, batches(1))
        assert not alerts
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight.mul_(100.0)
        train(model, batches(2))
    kinds = [(a.kind, a.layer) for a in alerts]
    assert ("entropy collapse", "blocks.1.attention") in kinds
    assert ("logit explosion", "blocks.1.attention") in kinds
    assert len(kinds) == len(set(kinds)), "each once"
    assert all(a.layer == "blocks.1.attention" for a in alerts)
    assert m.row().alerts, "but every row says it"


def test_an_alert_is_a_warning_by_default():
    model = made("a script")
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.mul_(100.0)
    context = gradlogz.monitor(model, every=1, thresholds=gradlogz.attention.Thresholds(entropy=None, sink=None))
    warned = pytest.warns(UserWarning, match="logit explosion in blocks.0.attention at step 0: .* above 100")
    with warned, context:
        train(model, batches(1))


def test_a_sink_is_reported():
    """Keys that agree with every query, at the first position alone."""
    model, alerts = made("a script"), []
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.qkv.bias[:16] = 3.0  # the same query for all
        attention.qkv.weight[:16] = 0.0
        model.embedding.weight[1] = 50.0 * torch.linspace(-1, 1, 16)
        attention.qkv.weight[16:32] = torch.linspace(-1, 1, 16)
    ids = batches(1)[0]
    ids[:, 1:][ids[:, 1:] == 1] = 2
    ids[:, 0] = 1
    with gradlogz.monitor(model, every=1, on_alert=alerts.append) as m:
        train(model, [ids])
    assert ("attention sink", "blocks.0.attention") in [(a.kind, a.layer) for a in alerts]
    assert float(m.row().layers["blocks.0.attention"].sink.mean.min()) > 0.9


def test_rows_of_a_gpu_are_written_at_the_end_of_the_next_step():
    """A GPU may still compute them at the end of their own; `_delayed` stands for one here."""
    written = {}
    for delayed in (False, True):
        taken, counts = [], []
        model = made("a script")
        with gradlogz.monitor(model, every=2, writer=taken.append, thresholds=QUIET) as m:
            m._delayed = delayed
            train(model, batches(5), after=lambda taken=taken, counts=counts: counts.append(len(taken)))
            assert counts == ([0, 1, 1, 2, 2] if delayed else [1, 1, 2, 2, 3])
            last = m.row()
            assert (last.step, len(taken)) == (4, 3)  # a request completes the row
        written[delayed] = taken
    for one, other in zip(written[False], written[True], strict=True):
        assert (one.step, one.scalars()) == (other.step, other.scalars())
    with gradlogz.monitor(model, every=1, writer=taken.append, thresholds=QUIET) as m:
        m._delayed = True
        train(model, batches(1))
    assert len(taken) == 4  # so does the end of the monitor


def test_writers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    taken = []
    model = made("a script")
    with gradlogz.monitor(model, every=1, writer=taken.append, thresholds=QUIET):
        train(model, batches(3))
    assert [row.step for row in taken] == [0, 1, 2]
    record = taken[-1].records()[0]
    assert set(record) >= {"step", "layer", "head", "rows", "entropy_mean", "max_logit_greatest", "sink_least"}
    assert "blocks.1" in str(taken[-1])

    model = made("a script")
    with SummaryWriter(tmp_path) as writer, gradlogz.monitor(model, every=1, writer=writer, thresholds=QUIET):
        train(model, batches(3))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["scalars"]) == 24, "twelve numbers of two layers"
    written = [e.value for e in events.Scalars("attention/blocks.0.attention/entropy")]
    expected = [float(row.layers["blocks.0.attention"].entropy.mean.mean()) for row in taken]
    assert written == pytest.approx(expected, rel=1e-6)
    assert set(events.Tags()["scalars"]) == set(taken[-1].scalars())


def test_a_function_with_a_step_gets_the_scalars():
    """As wandb.log: the parameter `step` is what tells it from a function of a row."""
    logged, rows_written = [], []

    class Run:
        def log(self, data, step=None, commit=None):
            logged.append((data, step, commit))

    model = made("a script")
    with (
        gradlogz.monitor(model, every=2, writer=Run().log, thresholds=QUIET),
        gradlogz.monitor(model, every=2, writer=rows_written.append, thresholds=QUIET),
    ):
        train(model, batches(3))
    assert logged == [(row.scalars(), row.step, None) for row in rows_written]
    assert [step for _, step, _ in logged] == [0, 2]
    heads = rows_written[0].layers["blocks.1.attention"]
    expected = {
        "entropy": heads.entropy.mean.mean(),
        "entropy_of_lowest_head": heads.entropy.mean.min(),
        "log_normalizer": heads.log_normalizer.mean.mean(),
        "log_normalizer_deviation": heads.log_normalizer.deviation.mean(),
        "logit_variance": heads.logit_variance.mean.mean(),
        "max_logit": heads.max_logit.greatest.max(),
        "sink": heads.sink.mean.mean(),
        "sink_of_strongest_head": heads.sink.mean.max(),
        "share_of_sink_heads": (heads.sink.mean > 0.3).double().mean(),
        "query_norm": heads.query_norm.mean.mean(),
        "key_norm": heads.key_norm.mean.mean(),
        "value_norm": heads.value_norm.mean.mean(),
    }
    found = {k.rpartition("/")[2]: v for k, v in logged[0][0].items() if k.startswith("attention/blocks.1.attention/")}
    assert found == {name: float(value) for name, value in expected.items()}
    assert all(type(value) is float for value in found.values())


def test_a_writer_that_raises_does_not_end_the_training():
    taken = []

    def write(row):
        taken.append((row.step, row.layers["blocks.0.attention"].rows))
        raise OSError("the tracker is offline")

    model = made("a script")
    with (
        pytest.warns(UserWarning, match="offline") as warned,
        gradlogz.monitor(model, every=1, writer=write, thresholds=QUIET) as m,
    ):
        train(model, batches(3))
    assert len(warned) == 1
    assert m.steps == 3
    assert taken == [(step, 3 * TOKENS) for step in range(3)]


# Several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["ddp", "sharded", *(pytest.param(how, marks=pytest.mark.long) for how in ("module", "local"))]
)
def test_processes_join_to_one_row(tmp_path, how):
    """By the group of the wrapper; by all processes where a part is monitored; not at all if it is not wanted."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(monitored_rank, (port, str(tmp_path), how), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    if how == "local":
        assert ranks[0]["records"] != ranks[1]["records"]
        assert {record["rows"] for rank in ranks for record in rank["records"]} == {2 * TOKENS}
        return
    torch.manual_seed(0)
    model = GPT(dropout=0.0)
    with gradlogz.monitor(model, every=2, thresholds=QUIET) as m:
        train(model, batches(3, size=4), rate=1e-5)
    assert ranks[0]["records"] == ranks[1]["records"]
    for found, expected in zip(ranks[0]["records"], m.row().records(), strict=True):
        assert found.keys() == expected.keys()
        assert all(found[k] == expected[k] for k in ("step", "layer", "kind", "head", "rows"))
        numbers = expected.keys() - {"layer", "kind"}
        assert all(found[k] == pytest.approx(expected[k], rel=1e-4, abs=1e-5) for k in numbers)


@pytest.mark.parametrize(
    "orders",
    [
        ["DDP, then compiled"],
        pytest.param([order for order in ORDERS if order != "DDP, then compiled"], marks=pytest.mark.long),
    ],
    ids=["one order", "all others"],
)
def test_the_order_of_compiling_and_wrapping_does_not_matter(tmp_path, orders):
    """Losses, weights and random state are the same bit for bit; the rows are those of both processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(wrapped_rank, (port, str(tmp_path), orders), nprocs=2)
    for rank in range(2):
        for order, (same, counts) in torch.load(tmp_path / f"{rank}.pt", weights_only=True).items():
            assert same, order
            assert counts is None or counts == [4 * TOKENS] * 2, order


def test_a_process_that_does_not_monitor_is_an_error(tmp_path):
    """Not a wait without end; and the processes may try again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(lonely_rank, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert "monitor: " in first["error"]
    assert "ranks [1]" in first["error"]
    assert second["error"] is None
    assert first["rows"] == second["rows"] == [{2 * 3 * TOKENS}] * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler looks at it
@pytest.mark.parametrize("order", ["compiled before", "compiled inside", "in place", "a function", "a block"])
def test_compiling_what_is_not_handed_over_keeps_the_training(order):
    """The hooks are traced with the model: they must not be part of its graph."""
    found = []
    for monitored in (False, True):
        torch._dynamo.reset()
        model = made("a script")
        call = torch.compile(model, backend="eager") if order == "compiled before" else model
        context = gradlogz.monitor(model, every=2, thresholds=QUIET, strict=False)
        with context if monitored else contextlib.nullcontext():
            if order == "compiled inside":
                call = torch.compile(model, backend="eager")
            elif order == "in place":
                model.compile(backend="eager")
            elif order == "a function":
                call = torch.compile(lambda ids, model=model: model(ids), backend="eager")
            elif order == "a block":
                model.blocks[0].compile(backend="eager")
            torch.manual_seed(1)
            found.append((train(model, batches(4), call=call), state(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][k], found[1][1][k]) for k in found[0][1])


def test_a_monitor_that_sees_nothing_says_so_after_the_first_step():
    torch._dynamo.reset()
    model = made("a script")
    call = torch.compile(model, backend="eager")
    passes = []

    def run():
        with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
            for ids in batches(3):
                passes.append(call(ids[:, :-1]))
                m.step()

    with pytest.raises(RuntimeError, match=r"^monitor: .*compiled"):
        run()
    assert len(passes) == 1
