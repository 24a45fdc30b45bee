"""A kernel is checked at its first use: one that is right passes, one that is wrong is replaced, with one warning."""

import json
import types
import warnings

import pytest
import torch

pytest.importorskip("triton")

from gradlogz.kernels.attention import canary, decoding, dispatch, gpu
from gradlogz.kernels.attention.canary import Kind
from gradlogz.kernels.attention.scoring import Scoring

pytestmark = pytest.mark.usefixtures("bounds_of_loops")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [
    (kernel, Kind(kernel.__name__, backward, torch.float32, 16, 16, masked, kernel is decoding, square))
    for kernel in (gpu, decoding)
    for backward in (False, True)
    for masked in (False, True)
    for square in (False, True)
]


def wrong(kernel, **broken):
    """A kernel in which some functions are broken."""
    functions = {name: getattr(kernel, name) for name in ("forward", "coefficients", "backward")}
    return types.SimpleNamespace(__file__=kernel.__file__, **(functions | broken))


@pytest.mark.parametrize(("kernel", "kind"), KINDS, ids=lambda x: getattr(x, "__name__", "").rpartition(".")[2])
def test_right_kernels_pass(kernel, kind):
    for causal in (False, True):
        assert canary._is_right(kernel, kind, DEVICE, causal=causal)


@pytest.mark.parametrize("field", range(5), ids=["output", "log normaliser", "entropy", "variance", "maximum"])
def test_a_wrong_statistic_is_noticed(field):
    def forward(*inputs, **options):
        result = list(gpu.forward(*inputs, **options))
        result[field] = result[field].clone()
        result[field][..., 7].mul_(1.5).add_(1.0)  # one row, or one column of the output
        return type("Broken", (tuple,), {"output": result[0]})(result)

    kind = Kind("gpu", False, torch.float32, 16, 16, False, False, False)
    assert not canary._is_right(wrong(gpu, forward=forward), kind, DEVICE, causal=False)


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_a_wrong_gradient_is_noticed(which):
    def backward(*inputs, **options):
        grads = list(gpu.backward(*inputs, **options))
        grads[which] = grads[which].clone()
        grads[which][0, 0, 3] = torch.nan
        return tuple(grads)

    kind = Kind("gpu", True, torch.float32, 16, 16, False, False, False)
    assert not canary._is_right(wrong(gpu, backward=backward), kind, DEVICE, causal=True)


@pytest.fixture
def imagined_gpu(monkeypatch, tmp_path):
    """A device that passes for a GPU of this name, with an empty memory of what has passed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "imagined")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    canary._checked.cache_clear()
    yield torch.device("cuda", 0)
    canary._checked.cache_clear()


@pytest.mark.parametrize("right", [True, False])
def test_what_has_passed_is_remembered_and_what_has_not_warns_once(imagined_gpu, monkeypatch, tmp_path, right):
    checks = []
    monkeypatch.setattr(canary, "_is_right", lambda *_, causal: checks.append(causal) or right)
    monkeypatch.setattr(canary, "_ptxas_version", lambda: "13.0")
    kind = Kind("gpu", False, torch.float32, 64, 64, False, False, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [canary.passes(gpu, kind, imagined_gpu) for _ in range(3)] == [right] * 3
    assert len(caught) == (0 if right else 1)
    assert checks == ([False, True] if right else [False])
    canary._checked.cache_clear()  # as in the next process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert canary.passes(gpu, kind, imagined_gpu) == right
    assert len(checks) == 2  # of two problems, or of the first one that failed, twice
    path = tmp_path / "gradlogz_checked_kernels.json"
    assert path.exists() == right
    if right:
        assert len(json.loads(path.read_text())) == 1
        path.write_text("{broken")  # a damaged file is no memory
        canary._checked.cache_clear()
        assert canary.passes(gpu, kind, imagined_gpu)
        assert len(checks) == 4


@pytest.mark.parametrize("masks", ["", "segments"])
def test_long_packed_documents_do_not_take_a_kernel_that_was_tested_on_short_ones(imagined_gpu, monkeypatch, masks):
    takes_all = types.SimpleNamespace(__name__="hopper", takes=lambda *_: True)
    monkeypatch.setattr(dispatch, "_hopper_kernel", lambda *_: takes_all)
    monkeypatch.setattr(canary, "passes", lambda *_: True)
    dispatch._gpu_kernel.cache_clear()
    for n in (dispatch.PACKED_KEYS_OF_HOPPER, dispatch.PACKED_KEYS_OF_HOPPER + 1):
        shape = torch.Size((1, 4, n, 64))
        chosen = dispatch._gpu_kernel(
            torch.bfloat16, imagined_gpu, shape, shape, Scoring(0.1), masks, 64, backward=False
        )
        expected = gpu if masks and n > dispatch.PACKED_KEYS_OF_HOPPER else takes_all
        assert chosen is expected
    dispatch._gpu_kernel.cache_clear()
