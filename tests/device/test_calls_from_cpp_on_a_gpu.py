"""Calls from C++ on a GPU are those of Python bit for bit, in every kind of call, on streams, in graphs and threads."""

import gc
import threading

import pytest
import torch

from gradlogz import attend
from gradlogz.kernels.attention import cpp_calls

hopper_backward = pytest.importorskip("gradlogz.kernels.attention.hopper_backward", reason="needs Triton")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

# Batch, heads, heads of keys, queries, keys, size.
SHAPES = [(2, 4, 4, 512, 512, 64), (1, 4, 2, 777, 777, 128), (2, 3, 1, 300, 1111, 40), (16, 16, 16, 512, 512, 64)]
COTANGENTS = [(), ("log_normalizer",), ("log_normalizer", "entropy", "logit_variance"), ("max_logit",), ("mean_logit",)]


@pytest.fixture(scope="module")
def module():
    assert cpp_calls.wait(), cpp_calls.problem()
    return cpp_calls._library.module


@pytest.fixture
def in_python(module, monkeypatch):
    """A function that makes calls without C++."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(cpp_calls._library, "module", None)
            patch.setattr(cpp_calls._library, "problem", "not now")
            return function()

    return call


@pytest.fixture
def counted(module, monkeypatch):
    """Number of calls that were made from C++."""
    calls = []

    class Counting:
        def __getattr__(self, name):
            return getattr(module, name)

        def attend(self, *arguments):
            results = module.attend(*arguments)
            calls.append(results is not None)
            return results

    monkeypatch.setattr(cpp_calls._library, "module", Counting())
    return calls


def drawn(shape, dtype=torch.bfloat16, per_token=False):
    b, h, hk, m, n, d = shape

    def draw(heads, tokens):
        if per_token:
            return torch.randn(b, tokens, heads, d, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.randn(b, heads, tokens, d, device="cuda", dtype=dtype)

    return [t.requires_grad_() for t in (draw(h, m), draw(hk, n), draw(hk, n))]


@pytest.mark.parametrize("rows", COTANGENTS, ids=str)
@pytest.mark.parametrize("per_token", [False, True], ids=["contiguous", "per token"])
@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (200, 0)}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_python_bit_for_bit(shape, band, per_token, rows, counted, in_python):
    operands = drawn(shape, torch.float16 if shape[0] == 1 else torch.bfloat16, per_token)
    cotangents = None

    def step(statistics="scalar"):
        nonlocal cotangents
        found = attend(*operands, enable_gqa=True, statistics=statistics, **band)
        outputs = [found.output, *(getattr(found, name) for name in rows if statistics == "scalar")]
        cotangents = cotangents or [torch.randn_like(t) for t in outputs]
        grads = torch.autograd.grad(outputs, operands, cotangents[: len(outputs)])
        return [t for t in found if t is not None] + list(grads)

    for statistics in ("scalar", "none"):
        expected = in_python(lambda s=statistics: step(s))
        for _ in range(3):
            found = step(statistics)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(counted) >= 4
    assert all(counted)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_step_of_training_without_gradients_and_from_other_streams_and_threads(counted, in_python):
    operands = drawn(SHAPES[0])

    def step():
        found = attend(*operands, is_causal=True)
        loss = found.output.float().square().sum() + found.log_normalizer.sum()
        return [*found[:6], *torch.autograd.grad(loss, operands)]

    expected, results = in_python(step), []
    for _ in range(2):
        step()
    with torch.no_grad():
        assert torch.equal(attend(*operands, is_causal=True).output, expected[0])
    torch.cuda.synchronize()

    def in_a_stream():
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                results.append(step())
            except Exception as error:
                results.append([error])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=in_a_stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for found in results:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(counted) >= 6


@pytest.mark.parametrize("rows", COTANGENTS[:3], ids=str)
def test_the_backward_pass_is_made_from_cpp_after_the_first_one(rows, counted, monkeypatch):
    in_python, backward = [], hopper_backward.backward
    monkeypatch.setattr(hopper_backward, "backward", lambda *a, **o: in_python.append(1) or backward(*a, **o))
    operands = drawn((3, 2, 2, 320 + 64 * len(rows), 320 + 64 * len(rows), 128))
    for call in range(4):
        found = attend(*operands, is_causal=True)
        loss = found.output.float().square().sum() + sum(getattr(found, name).sum() for name in rows)
        torch.autograd.grad(loss, operands)
        if call == 1:  # the first forward pass from C++
            before = len(in_python)
    assert before >= 1
    assert len(in_python) == before


def test_saved_tensors_that_were_moved_have_the_gradients_of_python(counted, in_python):
    """save_on_cpu makes them contiguous: the recorded launch has the strides of the operands."""
    operands = drawn((2, 4, 4, 512, 512, 64), per_token=True)

    def step():
        return torch.autograd.grad(attend(*operands, is_causal=True).output.float().square().sum(), operands)

    def offloaded():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            output = attend(*operands, is_causal=True).output
        return torch.autograd.grad(output.float().square().sum(), operands)

    expected = in_python(step)
    for call in (offloaded, step, offloaded, step, step):
        assert all(torch.equal(one, other) for one, other in zip(call(), expected, strict=True))


def test_several_cotangents_at_once_may_come_first(counted):
    operands = drawn((1, 2, 2, 704, 704, 64))
    attend(*operands)
    output = attend(*operands).output
    cotangents = torch.randn(3, *output.shape, device="cuda", dtype=output.dtype)
    batched = torch.autograd.grad(output, operands, cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        for one, other in zip(
            torch.autograd.grad(output, operands, cotangents[i], retain_graph=True), batched, strict=True
        ):
            torch.testing.assert_close(one, other[i], rtol=1e-2, atol=1e-2)


def test_second_derivatives_are_those_of_python(in_python, counted):
    operands = drawn((1, 2, 2, 256, 256, 64))

    def second():
        found = attend(*operands)
        grads = torch.autograd.grad(
            found.output.float().square().sum() + found.entropy.sum(), operands, create_graph=True
        )
        return torch.autograd.grad(sum(g.float().square().sum() for g in grads), operands)

    expected = in_python(second)
    for _ in range(3):
        for one, other in zip(second(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))
    assert counted


def test_many_calls_do_not_grow_in_memory(counted):
    operands = drawn(SHAPES[0])

    def step():
        torch.autograd.grad(attend(*operands, is_causal=True).output.float().sum(), operands)

    for _ in range(5):
        step()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        step()
    gc.collect()
    assert torch.cuda.memory_allocated() < before + 10 * operands[0].nbytes
    assert len(counted) >= 50
