"""Calls from C++ give the results and derivatives of calls from Python: the graph's node here, the launches on a GPU.

The kernels are functions in Python here, which compute by the torch path.
"""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradlogz import attend
from gradlogz.kernels.attention import blocked, cpp_calls, operator
from gradlogz.kernels.attention.reference import Gradients, Statistics
from gradlogz.kernels.attention.scoring import Scoring, Sight

SCORING = Scoring(0.4, right=0)
ROWS = ("log_normalizer", "entropy", "logit_variance")


@pytest.fixture(scope="module")
def module():
    if not cpp_calls.wait():
        pytest.skip(f"needs the library in C++: {cpp_calls.problem()}")
    return cpp_calls._library.module


@pytest.fixture(autouse=True)
def by_the_torch_path(monkeypatch):
    """`attend` and the calls compute by the same functions, so that they are equal bit for bit."""
    monkeypatch.setattr(operator.dispatch, "compiled_kernel", lambda *_, **__: None)
    monkeypatch.setattr(operator.dispatch.flash, "takes", lambda *_: False)


class RecordedCall:
    """A call whose launches are functions in Python; it counts them."""

    def __init__(self, module):
        self.module, self.launches, self.usual, self.in_python = module, [], [], 0
        self.call = module.Call(module.Launch(self.forward), torch.zeros(1), self.pull_back)

    def __call__(self, *operands):
        return self.module.attend(self.call, *operands)

    @torch.no_grad()
    def forward(self, query, key, value, *rest):
        *results, _plan, _segments, _spans = rest
        self.launches.append("forward")
        found = blocked.forward(query, key, value, Sight(), SCORING, None)
        for to, result in zip(results, (*found, found.log_normalizer - found.entropy), strict=True):
            to.copy_(result)

    def pull_back(self, call, saved, cotangents, usual):
        self.in_python += 1
        self.usual.append(usual)
        tensors = *saved[:3], None, None, None, None, *saved[3:]
        if usual:
            rows = sum(1 << i for i in (1, 2, 3) if cotangents[i] is not None)
            launches = self.module.Launch(self.coefficients), self.module.Launch(self.gradients)
            call.add_backward(rows, list(cotangents[0].stride()), *launches, torch.zeros(1), 2)
        return operator.pull_back(tensors, cotangents, SCORING, 0.0, needs_bias=False)[:3]

    def coefficients(self, output, *rest):
        self.launches.append("coefficients")
        grad_output, G, H, V, grad_G, grad_H, grad_V, per_row, *_ = rest
        assert per_row.numel() == 2 * G.numel() + 2 * 3  # and a zero for every 64 queries of a head
        self.rows = Statistics(output, G, H, V, G), Gradients(grad_output, grad_G, grad_H, grad_V, None)

    def gradients(self, query, key, value, _grad_output, grad_key, grad_value, sums, *_):
        self.launches.append("gradients")
        grads = operator._gradients(query, key, value, Sight(), SCORING, None, *self.rows, needs_bias=False)
        for to, grad in zip((sums, grad_key, grad_value), grads, strict=False):
            to.copy_(grad)


def drawn(**options):
    return [torch.randn(2, 3, 6, 8, **options).requires_grad_() for _ in range(3)]


def expected_of(operands):
    return attend(*operands, scale=SCORING.scale, is_causal=True)


def test_results_are_those_of_attend_and_need_no_graph_without_gradients(module):
    call, operands = RecordedCall(module), drawn()
    for requires_grad in (True, False):
        operands = [t.detach().requires_grad_(requires_grad) for t in operands]
        found, expected = call(*operands), expected_of(operands)
        assert all(
            torch.equal(one, other)
            for one, other in zip(found, [*expected[:3], *expected[4:6], expected[3]], strict=True)
        )
        assert {t.requires_grad for t in found} == {requires_grad}
    with torch.no_grad():
        assert not call(*drawn())[0].requires_grad


@pytest.mark.parametrize(
    "rows", [(), ("log_normalizer",), ("entropy",), ROWS, ("max_logit",), ("mean_logit",)], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "expanded"])
def test_gradients_are_those_of_attend_the_first_time_and_later(module, rows, layout):
    call, operands = RecordedCall(module), drawn()
    names = ["output", "log_normalizer", "entropy", "logit_variance", "max_logit", "mean_logit"]
    for again in range(3):
        outputs = dict(zip(names, call(*operands), strict=True))
        reference = expected_of(operands)
        cotangents = [torch.randn(()) .expand(outputs[name].shape) if layout == "expanded"
                      else torch.randn(outputs[name].shape) for name in ("output", *rows)]  # fmt: skip
        found = torch.autograd.grad([outputs[name] for name in ("output", *rows)], operands, cotangents)
        expected = torch.autograd.grad([getattr(reference, name) for name in ("output", *rows)], operands, cotangents)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        usual = not {"max_logit", "mean_logit"} & set(rows)
        assert call.in_python == (1 if usual else again + 1)
        assert call.launches.count("gradients") == (again if usual else 0)


def test_only_the_operands_that_need_gradients_get_them(module):
    call, (query, key, value) = RecordedCall(module), drawn()
    key = key.detach()
    for _ in range(2):
        call(query, key, value)[0].sum().backward()
    assert key.grad is None
    reference = [t.detach().requires_grad_() for t in (query, value)]
    (2 * expected_of([reference[0], key, reference[1]]).output.sum()).backward()
    torch.testing.assert_close(query.grad, reference[0].grad)
    torch.testing.assert_close(value.grad, reference[1].grad)


def test_second_derivatives_and_several_cotangents_at_once_are_those_of_attend(module):
    call, operands = RecordedCall(module), drawn(dtype=torch.float32)
    cotangents = torch.randn(4, 2, 3, 6, 8)

    def second(attended):
        output, G = attended
        grads = torch.autograd.grad((output.square().sum() + G.sin().sum()), operands, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), operands)

    for one, other in zip(second(call(*operands)[:2]), second(expected_of(operands)[:2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    batched = [torch.autograd.grad(output, operands, cotangents, is_grads_batched=True)
               for output in (call(*operands)[0], expected_of(operands).output)]  # fmt: skip
    for one, other in zip(*batched, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_graph_is_used_once_unless_it_is_retained(module):
    call, operands = RecordedCall(module), drawn()
    output = call(*operands)[0]
    first = torch.autograd.grad(output.sum(), operands, retain_graph=True)
    second = torch.autograd.grad(output.sum(), operands)
    assert all(torch.allclose(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), operands)


@pytest.mark.parametrize("changed", ["operand", "output", "entropy"])
def test_tensors_changed_in_place_before_the_backward_pass_are_noticed(module, changed):
    call, operands = RecordedCall(module), drawn()
    operands[0] = operands[0] * 1
    results = call(*operands)
    with torch.no_grad():
        {"operand": operands[0], "output": results[0], "entropy": results[2]}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(results[0].sum(), operands[1])


def test_hooks_of_saved_tensors_and_checkpoints_work(module):
    call, operands, packed = RecordedCall(module), drawn(), []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = call(*operands)[0]
    found = torch.autograd.grad(output.sum(), operands)
    assert len(packed) == 8
    again = checkpoint(lambda *inputs: call(*inputs)[0], *operands, use_reentrant=False)
    expected = torch.autograd.grad(expected_of(operands).output.sum(), operands)
    for grads in (found, torch.autograd.grad(again.sum(), operands)):
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_saved_tensors_of_another_layout_are_left_to_python(module):
    """As save_on_cpu returns them: the recorded launch would read them by the strides of the operands."""
    call = RecordedCall(module)
    operands = [torch.randn(2, 6, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(expected_of(operands).output.sum(), operands)

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            output = call(*operands)[0]
        return torch.autograd.grad(output.sum(), operands)

    for unpack in (torch.Tensor.contiguous, torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.clone):
        for one, other in zip(gradients(unpack), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert call.usual == [False, False, True]
    assert call.launches.count("gradients") == 1


def test_a_call_is_freed_with_its_backward_pass(module):
    class Backward:
        def __call__(self, *_):
            raise AssertionError

    backward = Backward()
    call, alive = module.Call(module.Launch(lambda *_: None), torch.zeros(1), backward), weakref.ref(backward)
    del backward
    assert alive() is not None
    del call
    gc.collect()
    assert alive() is None


def test_the_library_may_be_switched_off():
    program = "from gradlogz.kernels.attention import cpp_calls; print(cpp_calls.wait(), cpp_calls.problem())"
    environment = {**os.environ, "GRADLOGZ_CPP": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False GRADLOGZ_CPP=0 is set."


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "without its hash"])
def test_a_damaged_library_is_built_again(damage, tmp_path, monkeypatch):
    path, built = tmp_path / "library.so", []

    def compiled(to):
        built.append(to)
        to.write_bytes(b"library")
        to.with_suffix(".sha256").write_text(cpp_calls._hash(to))

    monkeypatch.setattr(cpp_calls, "_path", lambda: path)
    monkeypatch.setattr(cpp_calls, "_compile", compiled)
    assert cpp_calls._compiled() == cpp_calls._compiled() == path
    assert len(built) == 1
    if damage is None:
        path.with_suffix(".sha256").unlink()
    else:
        path.write_bytes(damage)
    cpp_calls._compiled()
    assert len(built) == 2
    assert not path.with_suffix(".lock").exists()


def test_the_lock_of_a_process_that_is_gone_is_taken_over(tmp_path, monkeypatch):
    path = tmp_path / "library.so"
    monkeypatch.setattr(cpp_calls, "_path", lambda: path)
    monkeypatch.setattr(cpp_calls, "_compile", lambda to: (
        to.write_bytes(b"x"), to.with_suffix(".sha256").write_text(cpp_calls._hash(to))))  # fmt: skip
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.with_suffix(".lock").write_text(str(gone.pid))
    assert cpp_calls._compiled() == path


def test_an_error_in_python_is_raised_by_the_backward_pass(module, monkeypatch):
    call = RecordedCall(module)

    def fail(*_):
        raise ValueError("no gradients today")

    monkeypatch.setattr(call, "pull_back", fail)
    call.call = module.Call(module.Launch(call.forward), torch.zeros(1), call.pull_back)
    with pytest.raises(ValueError, match="no gradients today"):
        call(*drawn())[0].sum().backward()


def test_unusual_operands_are_left_to_python(module):
    call = RecordedCall(module)
    query, key, value = (t.detach() for t in drawn())
    shifted = torch.randn(query.numel() + 1)[1:].view(query.shape)
    assert call(shifted, key, value) is None
    assert torch.func.vmap(lambda q: (call(q, key, value) is None) * q)(query.unsqueeze(0)).equal(query.unsqueeze(0))
    assert not call.launches


def test_the_node_has_a_name_and_the_graph_frees_its_tensors(module):
    call, (query, key, value) = RecordedCall(module), drawn()
    query = query * 1
    results = call(query, key, value)
    assert all("AttendBackward" in t.grad_fn.name() for t in results)
    saved = weakref.ref(query)
    del query
    assert saved() is not None
    del results
    gc.collect()
    assert saved() is None


def test_calls_whose_backward_pass_is_compiled_are_left_to_python():
    from torch._dynamo import compiled_autograd

    assert not cpp_calls._compiled_autograd()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert cpp_calls._compiled_autograd()
    assert not cpp_calls._compiled_autograd()
