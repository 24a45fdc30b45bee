"""attend with many queries on a GPU: the definition in float64, bit for bit the same again, streams, graphs, memory."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradlogz import attend
from gradlogz.kernels.attention import dispatch
from support.warp_states import warp_state_pairs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCRIPT = Path(__file__).parents[1] / "support" / "every_attention_kernel.py"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

BANDS = {
    "full": {},
    "causal": {"is_causal": True},
    "window before": {"window": (200, 0)},
    "window around": {"window": (77, 130)},
    "own key": {"window": (0, 0)},
}
# Batch, heads, heads of keys, queries, keys, size of keys, size of values.
SHAPES = [
    (2, 4, 4, 512, 512, 64, 64),
    (1, 4, 2, 777, 777, 128, 128),
    (2, 3, 1, 300, 1111, 40, 96),
    (1, 2, 2, 129, 640, 128, 64),
    (1, 6, 3, 1000, 1001, 16, 128),
    (1, 2, 2, 400, 400, 256, 256),
    (4, 16, 4, 640, 640, 64, 64),  # more tiles of queries than multiprocessors
]


def drawn(shape, dtype, per_token=False):
    b, h, hk, m, n, d, v = shape

    def draw(heads, tokens, size):
        if per_token:  # as the projections of a model, [b, n, h, d] in memory
            return torch.randn(b, tokens, heads, size, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.randn(b, heads, tokens, size, device="cuda", dtype=dtype)

    return 3 * draw(h, m, d), draw(hk, n, d), draw(hk, n, v)


@pytest.mark.parametrize(
    ("dtype", "shape", "band"),
    [
        *((torch.bfloat16, shape, band) for shape in SHAPES for band in BANDS),
        *((dtype, shape, band) for dtype in (torch.float16, torch.float32) for shape in SHAPES
          for band in ("causal", "window around")),
    ],
    ids=str,
)  # fmt: skip
def test_statistics_and_gradients_are_those_of_float64(shape, band, dtype):
    agree_with_float64(shape, dtype, BANDS[band])


def documents(*lengths: int) -> torch.Tensor:
    numbers = torch.arange(len(lengths), device="cuda")
    return numbers.repeat_interleave(torch.tensor(lengths, device="cuda"))


@pytest.mark.parametrize("band", ["full", "causal", "window around"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("queries", [1111, 300], ids=["square", "last queries"])
def test_packed_documents_see_only_themselves(queries, size, band):
    """Contiguous, in another order, in two parts and interleaved; shared by the batch or not."""
    contiguous = documents(300, 7, 512, 128, 130, 34)
    parts = documents(300, 400, 411) % 2
    for segments in (contiguous.unsqueeze(0), torch.stack([9 - contiguous, torch.arange(1111, device="cuda") % 3]),
                     torch.stack([parts, contiguous.flip(0)])):  # fmt: skip
        shape = (2, 4, 2, queries, 1111, size, size)
        agree_with_float64(shape, torch.bfloat16, BANDS[band] | {"segments": segments})


@pytest.mark.parametrize("band", ["full", "causal"])
@pytest.mark.parametrize("size", [64, 128])
def test_packed_documents_may_have_more_tiles_than_there_are_multiprocessors(size, band):
    segments = documents(128, 300, 84, 256).unsqueeze(0)
    agree_with_float64((4, 16, 4, 768, 768, size, size), torch.bfloat16, BANDS[band] | {"segments": segments})


@pytest.fixture
def hopper_for_packed_keys(monkeypatch):
    """Function that sets the number of packed keys up to which the Hopper kernel is used."""

    def use(keys):
        monkeypatch.setattr(dispatch, "PACKED_KEYS_OF_HOPPER", keys)
        dispatch._gpu_kernel.cache_clear()

    yield use
    dispatch._gpu_kernel.cache_clear()


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("lengths", [(512,) * 8, (300, 700, 512, 130, 1000, 454, 900, 100)], ids=["equal", "unequal"])
@pytest.mark.parametrize("band", ["full", "causal"])
@pytest.mark.parametrize("size", [64, 128])
def test_long_packed_documents_are_the_same_in_both_kernels(size, band, lengths, hopper_for_packed_keys):
    """And in a batch. These calls, of "packed" in benchmarks/attention_gpu.py, compile nearly all of its kernels."""
    inputs = drawn((4, 16, 16, 4096, 4096, size, size), torch.bfloat16)
    options = BANDS[band] | {"segments": documents(*lengths).unsqueeze(0)}
    results = []
    for keys in (0, 4096):
        hopper_for_packed_keys(keys)
        results.append(with_gradients(inputs, options))
    if len(set(lengths)) == 1:
        in_batch = [t.unflatten(2, (8, 512)).transpose(1, 2).flatten(0, 1).contiguous() for t in inputs]
        found = with_gradients(in_batch, BANDS[band])
        results.append([t.unflatten(0, (4, 8)).transpose(1, 2).flatten(2, 3) for t in found])
    for other in results[1:]:
        for i, (one, another) in enumerate(zip(results[0], other, strict=True)):
            rough = 2e-5 if 0 < i < 6 else 3e-2  # statistics are float32, each within 1e-5 of float64
            torch.testing.assert_close(one, another, rtol=0, atol=rough * (1 + float(one.abs().max())))


def with_gradients(inputs, options):
    """Output, statistics, and the gradients of output, log normaliser and entropy."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    found = attend(*leaves, **options)
    of_rows = found.output, found.log_normalizer, found.entropy
    grads = torch.autograd.grad([t.float().square().sum() for t in of_rows], leaves)
    return [t.detach() for t in (*found[:6], *grads)]


def agree_with_float64(shape, dtype, options):
    inputs = [t.requires_grad_() for t in drawn(shape, dtype, per_token=shape[4] % 2 == 1)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    options = options | {"enable_gqa": True}
    found, expected = attend(*inputs, **options), attend(*exact, **options)
    rough = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for name, one, other in zip(found._fields[:6], found[:6], expected[:6], strict=True):
        size = 1 + float(other.detach().abs().max())
        close = (rough if name == "output" else 1e-5) * size
        torch.testing.assert_close(one.double(), other, rtol=0, atol=close, msg=lambda m, name=name: f"{name}: {m}")
    cotangents = [torch.randn_like(t, dtype=torch.float32) for t in found[:5]]
    grads = [
        torch.autograd.grad(result[:5], operands, [g.to(t) for g, t in zip(cotangents, result, strict=False)])
        for result, operands in ((found, inputs), (expected, exact))
    ]
    # <grad_output, output> is subtracted from every <grad_output, v>, and the output is rounded to the dtype.
    along = (cotangents[0].norm(dim=-1) * found.output.detach().float().norm(dim=-1)).max()
    largest = max(float(t.detach().abs().max()) for t in inputs[:2])
    rounding = torch.finfo(dtype).eps * float(along) * largest * shape[5] ** -0.5
    for name, one, other in zip(("query", "key", "value"), *grads, strict=True):
        close = 3 * rough * (1 + float(other.abs().max())) + rounding
        torch.testing.assert_close(one.double(), other, rtol=0, atol=close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.skipif(not HOPPER, reason="kernels for Hopper GPUs")
def test_the_hopper_kernels_are_those_that_are_used():
    sight, scoring = dispatch.Sight(), dispatch.Scoring(0.1, right=0)
    for shape in SHAPES[:5]:
        operands = drawn(shape, torch.bfloat16)
        forward = dispatch.compiled_kernel(*operands, sight, scoring, None, backward=False)
        assert forward.__name__.endswith("hopper")
        backward = dispatch.compiled_kernel(*operands, sight, scoring, None, backward=True)
        square = shape[3] == shape[4] and shape[5] == shape[6]
        assert backward.__name__.endswith("hopper_backward" if square else "gpu")
        packed = dispatch.Sight(segments=documents(shape[4]).unsqueeze(0))
        forward = dispatch.compiled_kernel(*operands, packed, scoring, None, backward=False)
        assert forward.__name__.endswith("hopper")


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("operand", [0, 1], ids=["query", "key"])
def test_numbers_that_are_not_finite_stay_in_the_rows_that_see_them(operand, number, size):
    operands = drawn((1, 2, 2, 400, 400, size, size), torch.bfloat16)
    expected = attend(*operands, is_causal=True)
    operands[operand][0, 1, 150, 3] = number
    found = attend(*operands, is_causal=True)
    sees = torch.zeros(1, 2, 400, dtype=torch.bool, device="cuda")
    sees[0, 1, 150 : 151 if operand == 0 else None] = True
    for name in ("output", "log_normalizer", "entropy", "logit_variance"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(one[~sees], other[~sees]), name
        if number != number:
            assert one[sees].isnan().all(), name


@pytest.mark.parametrize("statistics", ["scalar", "none"])
@pytest.mark.parametrize("size", [64, 128])
def test_two_hundred_calls_are_equal_bit_for_bit(size, statistics):
    inputs = [t.requires_grad_() for t in drawn((2, 8, 4, 1000, 1000, size, size), torch.bfloat16)]
    first = None
    for _ in range(200):
        result = attend(*inputs, is_causal=True, enable_gqa=True, statistics=statistics)
        grads = torch.autograd.grad(result.output.float().square().sum(), inputs)
        tensors = [t for t in (*result, *grads) if t is not None]
        first = first or tensors
        assert all(torch.equal(one, other) for one, other in zip(tensors, first, strict=True))


def test_results_have_the_memory_layout_of_their_operands():
    """As those of scaled_dot_product_attention, so that the transposition after attention copies nothing."""
    inputs = [t.requires_grad_() for t in drawn((2, 4, 4, 512, 512, 64, 64), torch.bfloat16, per_token=True)]
    result = attend(*inputs)
    assert result.output.transpose(1, 2).is_contiguous()
    for grad in torch.autograd.grad(result.output.sum(), inputs):
        assert grad.transpose(1, 2).is_contiguous()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_streams_and_graphs_give_the_numbers_of_the_default_stream():
    inputs = drawn((2, 4, 4, 512, 512, 64, 64), torch.bfloat16)

    def step():
        leaves = [t.detach().requires_grad_() for t in inputs]  # of the stream of the step
        result = attend(*leaves, is_causal=True)
        loss = result.output.float().square().sum() + result.log_normalizer.square().sum()
        return (*result[:6], *torch.autograd.grad(loss, leaves))

    expected = step()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        in_stream = step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        in_graph = step()
    graph.replay()
    torch.cuda.synchronize()
    for found in (in_stream, in_graph):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("per_token", [False, True], ids=["contiguous", "per token"])
def test_a_compiled_step_has_one_graph_with_its_statistics_and_the_same_numbers(per_token):
    leaves = [t.requires_grad_() for t in drawn((2, 4, 4, 512, 512, 64, 64), torch.bfloat16, per_token)]

    def loss(query, key, value):
        result = attend(query, key, value, is_causal=True)
        z_loss = result.log_normalizer.square().mean() - result.entropy.mean()
        return result.output.transpose(1, 2).reshape(2, 512, 256).float().square().mean() + z_loss

    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * float(other.abs().max()))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of torch's compiler, in its own warm-up
def test_calls_of_a_new_kind_may_be_made_first_in_the_memory_of_a_cuda_graph():
    """Nothing that is kept for later calls is in that memory: torch refuses it."""
    leaves = [t.requires_grad_() for t in drawn((3, 2, 2, 448, 448, 64, 64), torch.bfloat16)]

    def loss(query, key, value):
        return attend(query, key, value, is_causal=True).output.float().square().mean()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    fresh = [torch.cat((t, t)).detach().requires_grad_() for t in leaves]  # another kind of call
    compiled = torch.compile(lambda *x: loss(*x) * 2, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [g.clone() for g in torch.autograd.grad(compiled(*fresh), fresh)]
    for one, other in zip(found, expected, strict=True):
        for half in one.chunk(2):
            torch.testing.assert_close(half, other, rtol=0, atol=1e-2 * float(other.abs().max()))


# Each compiles its kernels first, which takes most of the time: many small tests run at the same time.
TILINGS = [(kernel, size) for kernel in ("hopper", "gpu, half", "gpu, float32", "decoding") for size in (64, 128, 256)]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(("kernel", "size"), [each for each in TILINGS if each != ("hopper", 256)])
def test_no_kernel_leaves_its_memory_or_races(kernel, size, tool):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    if kernel == "hopper" and not HOPPER:
        pytest.skip("a kernel for Hopper GPUs")
    script = [sys.executable, str(SCRIPT), kernel, str(size)]
    subprocess.run(script, check=True, timeout=280)  # compiles outside the sanitizer, where it is slow
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    if tool == "memcheck":
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        assert "0 errors" in done.stdout
    else:
        pairs = re.findall(r"between (\w+) access at (\S+) .*?\n=+\s+and (\w+) access at (\S+) ", done.stdout)
        assert len(pairs) == done.stdout.count("Race reported"), done.stdout[-3000:]
        # Every kernel of Triton has pairs of writes by one instruction, where threads hold copies of a number of a row,
        # and those of several parts have Triton's own table of these parts: only other pairs count as races.
        others = [dict([pair[:2], pair[2:]]) for pair in pairs if pair[:2] != pair[2:] or pair[0] != "Write"]
        names = {place.partition("+")[0] for pair in others for place in pair.values()}
        states = warp_state_pairs(names)
        races = [pair for pair in others if (pair.get("Read"), pair.get("Write")) not in states]
        assert not races, races
        assert "RACECHECK SUMMARY" in done.stdout
