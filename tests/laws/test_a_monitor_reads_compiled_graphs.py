"""A compiled model is monitored while its graph runs: no pass, no graph and no bit is added.

A model that runs on attend computes the statistics in its graph. The graph of one that runs on fused operators of torch
shows its queries and keys.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gradlogz
from gradlogz.attention.in_models.compiled_passes import CompiledPasses
from gradlogz.attention.in_models.intercepted_calls import Call
from gradlogz.kernels.attention import operator
from support.architectures import ARCHITECTURES
from support.small_trainings import GPT, TOKENS, AttendAttention, batches, train

QUIET = gradlogz.attention.Thresholds(None, None, None)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler


def made(dropout=0.0, checkpointed=None, layers=2, on_attend=True):
    torch.manual_seed(0)
    model = GPT(dropout=dropout, checkpointed=checkpointed, layers=layers)
    for block in model.blocks if on_attend else ():
        block.attention = AttendAttention(block.attention, "scalar")
    return model.train()


def compiled(model, how, **options):
    torch._dynamo.reset()
    options = {"backend": "aot_eager", **options}
    if how == "wrapped":
        return torch.compile(model, **options)
    for part in [model] if how == "in place" else model.blocks:
        part.compile(**options)
    return model


@pytest.fixture
def passes(monkeypatch):
    """Calls of attention kernels, forward."""
    calls, forward = [], operator.dispatch.forward
    monkeypatch.setattr(operator.dispatch, "forward", lambda *a, **o: calls.append(o["statistics"]) or forward(*a, **o))
    return calls


@pytest.fixture
def eager_passes(monkeypatch):
    """Eager passes of compiled models."""
    passes, run_eager = [], CompiledPasses._run_eager
    monkeypatch.setattr(CompiledPasses, "_run_eager", lambda *a: passes.append(None) or run_eager(*a))
    return passes


def run(how, monitored, every=1, steps=4, dropout=0.0, checkpointed=None, on_attend=True, backend="aot_eager"):
    """Train; return losses, weights, random state, number of graphs, and the rows of the monitor."""
    model, rows = made(dropout, checkpointed, on_attend=on_attend), []
    call = compiled(model, how, backend=backend)
    counters.clear()
    torch.manual_seed(1)
    context = gradlogz.monitor(call, every=every, thresholds=QUIET, writer=rows.append)
    with context if monitored else contextlib.nullcontext():
        losses = train(model, batches(steps), call=call)
    graphs = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return (losses, [p.tolist() for p in model.state_dict().values()], torch.get_rng_state().tolist(), graphs), rows


@pytest.mark.parametrize(("how", "checkpointed"), [("wrapped", None), ("in place", False), ("blocks", False)])
def test_no_pass_no_graph_and_no_bit_is_added(how, checkpointed, passes):
    expected, _ = run(how, monitored=False, dropout=0.1, checkpointed=checkpointed)
    plain = list(passes)
    passes.clear()
    found, rows = run(how, monitored=True, dropout=0.1, checkpointed=checkpointed)
    assert found == expected
    assert passes == [True] * 2 + plain, "one eager pass for the names, in the first step"
    assert [row.step for row in rows] == [0, 1, 2, 3]
    assert all([heads.rows for heads in row.layers.values()] == [3 * TOKENS] * 2 for row in rows)


@pytest.mark.parametrize(("how", "backend"), [("wrapped", "inductor"), ("in place", "eager"), ("blocks", "aot_eager")])
def test_fused_operators_are_read_in_the_graph(how, backend, eager_passes):
    expected, _ = run(how, monitored=False, on_attend=False, backend=backend)
    found, rows = run(how, monitored=True, on_attend=False, backend=backend)
    assert found == expected
    assert len(eager_passes) == 1, "for the names, in the first step"
    assert [row.step for row in rows] == [0, 1, 2, 3]
    assert all([heads.rows for heads in row.layers.values()] == [3 * TOKENS] * 2 for row in rows)


@pytest.mark.parametrize("on_attend", [True, False])
@pytest.mark.parametrize(
    "how", ["wrapped", *(pytest.param(how, marks=pytest.mark.long) for how in ("in place", "blocks"))]
)
def test_the_rows_are_those_of_the_eager_model(how, on_attend):
    _, rows = run(how, monitored=True, on_attend=on_attend)
    model, expected = made(on_attend=on_attend), []
    torch.manual_seed(1)
    with gradlogz.monitor(model, every=1, thresholds=QUIET, writer=expected.append):
        train(model, batches(4))
    for row, other in zip(rows, expected, strict=True):
        assert list(row.layers) == list(other.layers)
        assert row.scalars() == pytest.approx(other.scalars(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "gpt_oss")] + ["llama"]
)
def test_registered_models_are_read_with_masks_and_sinks(name, passes, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(operator.dispatch, "WORTH_COMPILING", 0)
    torch._dynamo.reset()
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    gradlogz.register()
    try:
        model, inputs, rows = architecture.build("gradlogz").train(), architecture.inputs("left"), []
        twin = copy.deepcopy(model)
        for each in (torch.compile(model, backend="aot_eager"), twin):
            with gradlogz.monitor(each, every=1, thresholds=QUIET, writer=rows.append) as m:
                for _ in range(2):
                    passes.clear()
                    each(**inputs).logits.square().mean().backward()
                    m.step()
    finally:
        gradlogz.attention.unregister()
    assert len(passes) == len(m.row().layers)
    _, found, _, expected = rows
    assert list(found.layers) == list(expected.layers)
    assert found.scalars() == pytest.approx(expected.scalars(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("how", ["compiled", "compiled, on SDPA", "eager"])
def test_a_mask_of_all_layers_is_examined_once_in_a_pass(how, monkeypatch):
    """To find padding and first keys in a mask takes longer than the sums of a layer."""
    torch._dynamo.reset()
    examined, visible_keys = [], Call.visible_keys
    monkeypatch.setattr(Call, "visible_keys", lambda call: examined.append(call) or visible_keys(call))
    architecture = next(a for a in ARCHITECTURES if a.name == "llama")
    model, inputs = architecture.build("sdpa").train(), architecture.inputs("left")
    if how != "compiled, on SDPA":
        gradlogz.register(model)
    try:
        call = model if how == "eager" else torch.compile(model, backend="aot_eager")
        with gradlogz.monitor(call, every=1, thresholds=QUIET) as m:
            for _ in range(3):
                examined.clear()
                call(**inputs).logits.square().mean().backward()
                m.step()
    finally:
        gradlogz.attention.unregister(model)
    assert len(m.row().layers) >= 2
    assert len(examined) == 1


@pytest.mark.parametrize("padding", ["left", None])
def test_fused_operators_are_read_with_masks_and_groups_of_heads(padding, eager_passes):
    torch._dynamo.reset()
    architecture = next(a for a in ARCHITECTURES if a.name == "llama")
    model, inputs, rows = architecture.build("sdpa").train(), architecture.inputs(padding), []
    twin = copy.deepcopy(model)
    for each in (torch.compile(model, backend="aot_eager"), twin):
        with gradlogz.monitor(each, every=1, thresholds=QUIET, writer=rows.append) as m:
            for _ in range(2):
                each(**inputs).logits.square().mean().backward()
                m.step()
    assert len(eager_passes) == 1
    _, found, _, expected = rows
    assert list(found.layers) == list(expected.layers)
    assert found.scalars() == pytest.approx(expected.scalars(), rel=1e-4, abs=1e-5)


def test_a_layer_that_is_not_fused_needs_eager_passes(eager_passes):
    run("wrapped", monitored=True, on_attend=False, dropout=0.1)  # dropout on a CPU is not fused
    assert len(eager_passes) == 4


class SinkAttention(AttendAttention):
    """Attention with a learned logit for each head, which `attend` adds outside of the operator."""

    def __init__(self, like):
        super().__init__(like, "scalar")
        self.sinks = nn.Parameter(torch.linspace(-1.0, 2.0, self.heads))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        result = gradlogz.attend(q, k, v, is_causal=True, sinks=self.sinks)
        return self.out(result.output.transpose(1, 2).flatten(2))


def test_learned_sinks_are_part_of_the_rows(passes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SinkAttention(GPT(dropout=0.0).blocks[0].attention)
    x, rows = torch.randn(3, 7, 16), []
    for call in (torch.compile(model, backend="aot_eager"), model):
        with gradlogz.monitor(call, every=1, thresholds=QUIET, writer=rows.append) as m:
            for _ in range(2):
                passes.clear()
                call(x).sum().backward()
                with torch.no_grad():
                    model.sinks.add_(0.5)
                m.step()
        model.sinks.data.sub_(1.0)
        assert len(passes) == 1
    assert rows[1].scalars() == pytest.approx(rows[3].scalars(), rel=1e-5, abs=1e-5)


class Towers(nn.Module):
    """Two towers with the same sizes, which do not depend on each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (AttendAttention(GPT(dropout=0.0).blocks[0].attention, "scalar") for _ in range(2))
        with torch.no_grad():
            self.second.qkv.weight.mul_(3.0)

    def forward(self, x):
        return self.first(x) + self.second(x)


def swapping(graph, inputs):
    """Backend that computes the second attention before the first, as a scheduler may."""
    first, second = (node for node in graph.graph.nodes if "gradlogz" in str(node.target))
    needed = [second]
    for node in needed:
        needed += [each for each in node.all_input_nodes if each not in needed]
    for node in list(graph.graph.nodes):
        if node in needed and node.op != "placeholder":
            first.prepend(node)
    graph.recompile()
    return graph.forward


def test_layers_in_another_order_keep_their_names(passes):
    torch._dynamo.reset()
    model, rows = Towers(), []
    call, x = torch.compile(model, backend=swapping), torch.randn(3, 7, 16)
    with gradlogz.monitor(call, every=1, thresholds=QUIET, writer=rows.append) as m:
        for _ in range(3):
            call(x).sum().backward()
            m.step()
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        model(x).sum().backward()
        m.step()
    for row in rows:
        assert row.scalars() == pytest.approx(m.row().scalars(), rel=1e-4, abs=1e-5)
    assert len(passes) == 3 * 4 + 2, "eager passes are kept"


def test_other_batch_sizes_are_read(passes):
    torch._dynamo.reset()
    model = made()
    call = torch.compile(model, backend="aot_eager", dynamic=True)
    with gradlogz.monitor(call, every=1, thresholds=QUIET) as m:
        for size, tokens in ((3, 10), (5, 8), (2, 13)):
            passes.clear()
            call(batches(1, size=size)[0][:, :tokens]).sum().backward()
            m.step()
            assert {heads.rows for heads in m.row().layers.values()} == {size * tokens}
    assert len(passes) == 2
