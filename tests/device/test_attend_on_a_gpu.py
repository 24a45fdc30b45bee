"""attend on a GPU: every convention against enumeration, gradients against float64, compiled and not."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import attend
from gradlogz.attention.row_fields import FIELDS
from gradlogz.kernels.attention import dispatch
from support.enumerated_attention import NAMES, Case, cases, enumerated, enumerated_row_fields

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Half precision: logits are exact products of what was rounded, the weights are rounded again before they meet values.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-4}


@pytest.fixture(params=["few queries", "many queries"])
def kernel(request, monkeypatch):
    """Both kernels: the queries of these cases are few, and would all be those of decoding."""
    if request.param == "many queries":
        monkeypatch.setattr(dispatch, "FEW_QUERIES", 0)


def on_gpu(case: Case) -> Case:
    options = {k: t.cuda() if isinstance(t, torch.Tensor) else t for k, t in case.options.items()}
    return Case(*(t.cuda() for t in case[:3]), options)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("d", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_statistics_agree_with_enumeration(name, dtype, d):
    case = cases(dtype, d=d, v=d)[name]
    for statistics in ("scalar", "moments"):
        found = attend(*on_gpu(case)[:3], **on_gpu(case).options, statistics=statistics)
        for field, expected in enumerated(case).items():
            actual = getattr(found, field)
            if actual is None:
                continue
            size = 1 + float(expected[expected.isfinite()].abs().max())
            half = field == "output" and dtype == torch.bfloat16
            tolerance = size * (1e-2 if half else TOLERANCE[dtype])
            torch.testing.assert_close(
                actual.double().cpu(), expected, rtol=0, atol=tolerance, msg=lambda m, f=field: f"{f}: {m}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_row_fields_agree_with_enumeration(name, dtype):
    case = cases(dtype, d=16, v=16)[name]
    found = attend(*on_gpu(case)[:3], **on_gpu(case).options, fields=FIELDS)
    expected = enumerated_row_fields(case)
    assert torch.equal(found.max_key.cpu(), expected["max_key"])
    for field in ("min_logit", "first_key_weight"):
        torch.testing.assert_close(getattr(found, field).double().cpu(), expected[field], rtol=1e-5, atol=1e-5)


def gradients(function, case, **fixed):
    """The gradients of everything, through all statistics at once."""
    tensors = {
        name: t.detach().clone().requires_grad_()
        for name, t in {**case.options, **dict(zip(("query", "key", "value"), case[:3], strict=True))}.items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    fixed |= {name: t for name, t in case.options.items() if name not in tensors}
    found = function(**tensors, **fixed)
    total = sum(t.double().masked_fill(t == -torch.inf, 0.0).sin().sum() for t in found if t is not None)
    return torch.autograd.grad(total, tuple(tensors.values()))


def in_double(case: Case) -> Case:
    options = {
        k: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for k, t in case.options.items()
    }
    return Case(*(t.double() for t in case[:3]), options)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in NAMES), ("causal", True), ("everything", True)]
)
def test_gradients_agree_with_float64(name, dtype, compiled):
    case = cases(dtype, d=16, v=16)[name]
    function = torch.compile(attend, fullgraph=True) if compiled else attend
    expected = gradients(attend, in_double(case))
    for actual, value in zip(gradients(function, on_gpu(case)), expected, strict=True):
        size = 1 + float(value.abs().max())
        tolerance = size * (2e-5 if dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(actual.double().cpu(), value, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "grouped heads", "bias", "everything"])
def test_moments_of_large_heads_agree_with_enumeration(name, dtype):
    """Their values, [v, v^2, k, |k|^2], are wider than any kernel takes at once.

    Variances are of the size of the head, and of the sine of 128 in float32 five digits are left.
    """
    case = cases(dtype, d=128, v=128)[name]
    found = attend(*on_gpu(case)[:3], **on_gpu(case).options, statistics="moments")
    for field, expected in enumerated(case).items():
        size = 1 + float(expected[expected.isfinite()].abs().max())
        tolerance = size * (1e-2 if field == "output" and dtype == torch.bfloat16 else 1e-5)
        torch.testing.assert_close(getattr(found, field).double().cpu(), expected, rtol=0, atol=tolerance, msg=field)
    expected = gradients(attend, in_double(case), statistics="moments")
    for actual, value in zip(gradients(attend, on_gpu(case), statistics="moments"), expected, strict=True):
        size = 1 + float(value.abs().max())
        tolerance = size * (1e-4 if dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(actual.double().cpu(), value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [40, 64, 128, 256])
def test_a_cache_grows_token_after_token(d, dtype):
    """One compiled kernel serves every length and every layout of the cache; also more queries, as in speculation."""
    cache = torch.randn(2, 2, 2, 4200, d, device="cuda", dtype=dtype)
    for n in (1, 2, 15, 16, 63, 64, 65, 127, 511, 512, 513, 1000, 4096, 4099):
        for queries, whole in ((1, False), (3, True)):
            q = torch.randn(2, 8, queries, d, device="cuda", dtype=dtype)
            k, v = (t[:, :, :n].contiguous() if whole else t[:, :, :n] for t in cache)
            options = {"is_causal": True, "enable_gqa": True}
            found = attend(q, k, v, **options)
            exact = attend(q.double(), k.double(), v.double(), **options)
            rough = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
            for name, one, other in zip(found._fields[:6], found[:6], exact[:6], strict=True):
                close = rough if name == "output" else 2e-5
                torch.testing.assert_close(one.double(), other, rtol=close, atol=close, msg=f"{name} of {n} keys")


def test_decoding_in_streams_and_graphs_is_that_of_the_default_stream():
    """Only there do calls share their room: elsewhere they may be under way at once."""
    q = torch.randn(8, 4, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(8, 4, 2, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = [attend(*three) for three in zip(q, k, v, strict=True)]
    streams = [torch.cuda.Stream() for _ in q]
    torch.cuda.synchronize()
    in_streams, graphs, in_graphs = [], [], []
    for stream, *three in zip(streams, q, k, v, strict=True):
        with torch.cuda.stream(stream):
            in_streams.append([attend(*three) for _ in range(20)])
    torch.cuda.synchronize()
    for three in zip(q, k, v, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            in_graphs.append([attend(*three) for _ in range(20)])
    for _ in range(3):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for e, *found in zip(expected, in_streams, in_graphs, strict=True):
        for each in (a for repeated in found for a in repeated):
            assert all(torch.equal(*pair) for pair in zip(each[:6], e[:6], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 100, 1000])
def test_the_output_is_that_of_sdpa(tokens, dtype):
    q, k, v = (torch.randn(2, 4, tokens, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    found, expected = attend(q, k, v, is_causal=True), scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found.output, expected, rtol=0, atol=2e-2)
    ours, theirs = (torch.autograd.grad(t.float().square().sum(), (q, k, v)) for t in (found.output, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=6e-2)


def test_second_derivatives_are_there():
    q, k = torch.randn(6, 16, device="cuda"), torch.randn(20, 16, device="cuda")
    found = torch.func.hessian(lambda x: attend(x, k, k, scale=1.0).log_normalizer.sum())(q)
    q, k = q.double().cpu(), k.double().cpu()
    expected = torch.func.hessian(lambda x: attend(x, k, k, scale=1.0).log_normalizer.sum())(q)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=1e-3)
