"""The monitor on a GPU: the same training bit for bit, no kernel more on `attend`, no memory, and CUDA graphs."""

import contextlib

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import gradlogz
from gradlogz.attention.in_models.compiled_passes import CompiledPasses
from gradlogz.kernels.attention import operator

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # torch's compiler
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # which torch recommends
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # of torch's compiler, in its own warm-up
]
QUIET = gradlogz.attention.Thresholds(None, None, None)
LAYERS, HEADS, TOKENS, SEQUENCES = 2, 4, 64, 4  # so few tokens that torch's own backward pass is reproducible
COMPILED = {"eager": None, "compiled": {}, "CUDA graphs": {"mode": "reduce-overhead"}}


def made(on_attend, size=64, layers=LAYERS):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=HEADS * size, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to("cuda", torch.bfloat16).train()
    model.get_input_embeddings().requires_grad_(False)  # its compiled gradient adds in any order
    if on_attend:
        gradlogz.register(model)
    return model


def batches(steps, tokens=TOKENS, sequences=SEQUENCES):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 100, (steps, sequences, tokens), generator=generator).cuda()


def trained(on_attend, how, monitored, every=2, steps=6):
    """Train; return losses and weights, and the rows of the monitor."""
    torch._dynamo.reset()
    model, rows = made(on_attend), []
    call = model if COMPILED[how] is None else torch.compile(model, **COMPILED[how])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
    losses = []
    context = gradlogz.monitor(call, every=every, thresholds=QUIET, writer=rows.append)
    # Kernels of torch's compiler that are chosen by their speed would differ between two trainings.
    reproducible = torch._inductor.config.patch(deterministic=True)
    with reproducible, context if monitored else contextlib.nullcontext():
        for ids in batches(steps):
            torch.compiler.cudagraph_mark_step_begin()
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    return (torch.stack(losses).tolist(), [p.tolist() for p in model.parameters()]), rows


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_the_training_is_the_same_bit_for_bit(on_attend, how):
    plain, _ = trained(on_attend, how, monitored=False)
    again, _ = trained(on_attend, how, monitored=False)
    assert again == plain, "the training itself is reproducible: without this the law says nothing"
    found, rows = trained(on_attend, how, monitored=True)
    assert found == plain
    assert all([heads.rows for heads in row.layers.values()] == [SEQUENCES * TOKENS] * LAYERS for row in rows)
    # While a CUDA graph is recorded its calls cannot be read: one recorded step may have no row, and none is stale.
    steps = [row.step for row in rows]
    assert steps == [0, 2, 4] if how != "CUDA graphs" else set(steps) <= {0, 2, 4} and len(steps) >= 2


@pytest.mark.parametrize("how", ["compiled", "CUDA graphs"])
@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_rows_of_compiled_models_are_those_of_the_eager_one(on_attend, how):
    """Statistics of each step, not those of the step in which a graph was recorded."""
    _, expected = trained(on_attend, "eager", monitored=True)
    _, rows = trained(on_attend, how, monitored=True)
    by_step = {row.step: row for row in expected}
    assert len({tuple(row.scalars().values()) for row in rows}) == len(rows) >= 2, "a row repeats another"
    for row in rows:
        assert list(row.layers) == list(by_step[row.step].layers)
        assert row.scalars() == pytest.approx(by_step[row.step].scalars(), rel=0.05, abs=0.05)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_no_kernel_runs_more_often_on_attend(how, monkeypatch):
    calls, forward = [], operator.dispatch.forward
    monkeypatch.setattr(operator.cpp_calls, "attend", lambda *_: None)  # whose calls would not be counted
    monkeypatch.setattr(operator.dispatch, "forward", lambda *a, **o: calls.append(o["statistics"]) or forward(*a, **o))
    trained(True, how, monitored=False, every=1)
    plain = list(calls)
    calls.clear()
    trained(True, how, monitored=True, every=1)
    names = LAYERS if how == "compiled" else 0  # one eager pass, for the names of the layers
    assert plain == [True] * len(plain)
    assert len(calls) == len(plain) + names


@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_a_compiled_model_is_read_in_its_graph(on_attend, monkeypatch):
    passes, run_eager = [], CompiledPasses._run_eager
    monkeypatch.setattr(CompiledPasses, "_run_eager", lambda *a: passes.append(None) or run_eager(*a))
    _, rows = trained(on_attend, "compiled", monitored=True, every=1)
    assert len(rows) == 6
    assert len(passes) == 1, "for the names of the layers"


@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_memory_hardly_grows(on_attend):
    """Peak of allocated memory with the monitor in every step, at most 1.01 times that without it."""
    peaks = []
    for monitored in (False, True):
        torch._dynamo.reset()
        model = made(on_attend, layers=4)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)
        context = gradlogz.monitor(model, every=1, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context:
            for number, ids in enumerate(batches(4, tokens=2048, sequences=8)):
                if number == 2:
                    torch.cuda.reset_peak_memory_stats()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        del model, optimizer, context
        torch.cuda.empty_cache()
    assert peaks[1] <= 1.01 * peaks[0]


@contextlib.contextmanager
def without_waits():
    """Context in which a wait of the host for the device is an error."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Attention(nn.Module):
    """Attention without a wait for the device, so that a step can be captured by hand."""

    def __init__(self, on_attend):
        super().__init__()
        self.qkv, self.out, self.on_attend = nn.Linear(256, 768), nn.Linear(256, 256), on_attend

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.on_attend:
            y = gradlogz.attend(q, k, v, is_causal=True).output
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_the_host_does_not_wait_in_a_recorded_pass(on_attend):
    """Neither forward nor backward waits for the device; the row is copied while the next step runs."""
    model = nn.Sequential(*(Attention(on_attend) for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    x = torch.randn(SEQUENCES, TOKENS, 256, device="cuda", dtype=torch.bfloat16)

    def run():
        model(x).float().square().mean().backward()

    run()  # kernels are compiled and checked
    with without_waits():
        run()  # the model itself does not wait
    with gradlogz.monitor(model, every=1, thresholds=QUIET) as m:
        run()
        m.step()
        with without_waits():
            run()
        m.step()
    assert len(m.row().layers) == LAYERS


def step_by_hand(on_attend):
    """Model, its input, and a step that a CUDA graph can hold, run three times on a side stream as torch asks."""
    torch.manual_seed(0)
    model = Attention(on_attend).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, capturable=True)
    x = torch.randn(SEQUENCES, TOKENS, 256, device="cuda", dtype=torch.bfloat16)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).float().square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    return model, step


@pytest.mark.parametrize("every", [1, 2])  # in the second case the captured step is not a recorded one
@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_a_step_captured_by_hand_inside_the_monitor_is_refused_by_name(on_attend, every):
    """Its hooks would run once, while it is captured: statistics would be stale, or part of the graph."""
    model, step = step_by_hand(on_attend)
    graph = torch.cuda.CUDAGraph()
    with gradlogz.monitor(model, every=every, thresholds=QUIET):
        if every == 2:
            step()
        with pytest.raises(NotImplementedError, match="CUDA graph"), torch.cuda.graph(graph):
            step()
    torch.cuda.synchronize()
    step()  # the monitor is gone, and the model trains on


@pytest.mark.parametrize("on_attend", [False, True], ids=["sdpa", "attend"])
def test_a_graph_captured_before_the_monitor_trains_unchanged_and_has_no_rows(on_attend):
    weights = []
    for monitored in (False, True):
        model, step = step_by_hand(on_attend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        context = gradlogz.monitor(model, every=1, thresholds=QUIET) if monitored else contextlib.nullcontext()
        with context as m:
            for _ in range(4):
                graph.replay()
            if monitored:
                with pytest.raises(RuntimeError, match="no step"):
                    m.row()
        torch.cuda.synchronize()
        weights.append([p.tolist() for p in model.parameters()])
    assert weights[0] == weights[1]
