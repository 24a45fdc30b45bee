"""Few queries, keys in parts: what enumeration says, on a GPU where there is one, else in Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")

from gradlogz import attend
from gradlogz.kernels.attention import blocked, decoding, dispatch
from gradlogz.kernels.attention.reference import Statistics
from gradlogz.kernels.attention.scoring import Scoring, Sight
from gradlogz.kernels.attention.wide_values import Chunked
from support.enumerated_attention import Case, enumerated

pytestmark = pytest.mark.usefixtures("bounds_of_loops")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


PARTS = {"1 part": (1, True), "2 parts, joined later": (2, False), "7 parts": (7, True)}


@pytest.fixture(params=PARTS.values(), ids=PARTS)
def parts(request, monkeypatch):
    """Tiles of 32 keys, so that 75 of them are 3 tiles: 2 parts are not equal, 7 leave some without any."""
    small, (count, at_once) = (decoding.Tiling(32, 4, 2, 1),) * 3, request.param
    monkeypatch.setattr(decoding, "TILINGS", dict.fromkeys(decoding.TILINGS, small))
    monkeypatch.setattr(decoding, "FEW_PARTS", decoding.FEW_PARTS if at_once else 0)
    monkeypatch.setattr(decoding, "_splits", lambda *_: count)
    monkeypatch.setattr(dispatch, "compiled_kernel", lambda *_, **__: decoding)
    decoding._call.cache_clear()
    yield count
    decoding._call.cache_clear()


def operands(m=1, n=75, h=4, hk=2, d=16, v=16) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, h, m, d), torch.randn(2, hk, n, d), torch.randn(2, hk, n, v)


def chance(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) > 0.4


def additive() -> torch.Tensor:
    return torch.randn(1, 4, 3, 75).masked_fill(~chance(1, 4, 3, 75), -math.inf)


def with_an_empty_row() -> torch.Tensor:
    mask = chance(2, 1, 3, 75)
    mask[0, 0, 1] = False
    return mask


def documents() -> torch.Tensor:
    return torch.randint(0, 3, (2, 75)).sort().values


CASES = {
    "one query": lambda: (operands(), {}),
    "some queries": lambda: (operands(m=3), {}),
    "a negative scale": lambda: (operands(m=3), {"scale": -0.7}),
    "one key": lambda: (operands(m=3, n=1), {}),
    "whole tiles": lambda: (operands(n=64), {}),
    "odd sizes": lambda: (operands(d=19, v=5), {}),
    "more rows than fit a small tile": lambda: (operands(m=9), {"is_causal": True}),
    "one head each": lambda: (operands(h=2, m=3), {}),
    "causal": lambda: (operands(m=3), {"is_causal": True}),
    "causal, first rows without keys": lambda: (operands(m=5, n=3), {"is_causal": True}),
    "window": lambda: (operands(m=3), {"window": (40, 0)}),
    "window in the middle of a tile": lambda: (operands(m=3), {"window": (3, 1)}),
    "bool mask": lambda: (operands(m=3), {"attn_mask": chance(2, 4, 3, 75)}),
    "bool mask with an empty row": lambda: (operands(m=3), {"attn_mask": with_an_empty_row()}),
    "bool mask of keys": lambda: (operands(m=3), {"attn_mask": chance(2, 1, 1, 75)}),
    "additive mask": lambda: (operands(m=3), {"attn_mask": additive()}),
    "bias of keys": lambda: (operands(m=3), {"bias": torch.randn(2, 1, 1, 75)}),
    "segments": lambda: (operands(m=3), {"segments": documents()}),
    "softcap": lambda: (operands(m=3), {"softcap": 0.7}),
    "everything": lambda: (
        operands(m=3),
        {
            "attn_mask": chance(2, 4, 3, 75),
            "bias": torch.randn(1, 4, 1, 75),
            "is_causal": True,
            "window": (50, 2),
            "segments": documents(),
            "softcap": 1.5,
            "sinks": torch.randn(4),
        },
    ),
}


def moved(tensor, dtype=None):
    floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    tensor = tensor.to(DEVICE) if isinstance(tensor, torch.Tensor) else tensor
    return tensor.to(dtype) if floating and dtype is not None else tensor


# How parts are joined does not depend on what a query sees in them: every case in 7 parts, some of which see nothing;
# in 1 and in 2 those whose rows, keys or parts are few or empty, and the others in the long suite.
JOINED = {"one query", "one key", "more rows than fit a small tile", "causal, first rows without keys",
          "bool mask with an empty row", "window in the middle of a tile", "everything"}  # fmt: skip
EACH = [
    pytest.param(way, name, id=f"{kind}-{name}", marks=() if kind == "7 parts" or name in JOINED else pytest.mark.long)
    for kind, way in PARTS.items()
    for name in CASES
]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("parts", "name"), EACH, indirect=["parts"])
def test_statistics_are_those_of_enumeration(name):
    three, options = CASES[name]()
    found = attend(*map(moved, three), **{k: moved(t) for k, t in options.items()}, enable_gqa=True)
    for field, expected in enumerated(Case(*three, options)).items():
        actual = getattr(found, field)
        if actual is not None:
            size = 1 + float(expected[expected.isfinite()].abs().max())
            torch.testing.assert_close(actual.double().cpu(), expected, rtol=0, atol=1e-5 * size, msg=field)


@pytest.mark.parametrize("name", ["some queries", "causal", "bool mask with an empty row", "everything"])
def test_gradients_are_those_of_the_definition(name, parts):
    three, options = CASES[name]()

    def gradients(dtype):
        leaves = [moved(t, dtype).requires_grad_() for t in three]
        found = attend(*leaves, **{k: moved(t, dtype) for k, t in options.items()}, enable_gqa=True)
        total = sum(t.masked_fill(t == -torch.inf, 0.0).double().sin().sum() for t in found if t is not None)
        return torch.autograd.grad(total, leaves)

    ours = gradients(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "compiled_kernel", lambda *_, **__: None)
        theirs = gradients(torch.float64)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * (1 + float(other.abs().max())))
    assert parts


@pytest.mark.usefixtures("parts")
def test_without_statistics_the_output_is_the_same():
    q, k, v = map(moved, operands(m=3))
    with_them = decoding.forward(q, k, v, Sight(), Scoring(0.25))
    without = decoding.forward(q, k, v, Sight(), Scoring(0.25), statistics=False)
    for one, other in zip((*with_them[:2], with_them.max_logit), (*without[:2], without.max_logit), strict=True):
        torch.testing.assert_close(one, other)
    assert (without.entropy == 0).all()
    assert (without.logit_variance == 0).all()


@pytest.mark.usefixtures("parts")
def test_wide_values_are_taken_in_pieces(monkeypatch):
    monkeypatch.setattr(dispatch, "compiled_kernel", lambda *_, **__: Chunked(decoding, 16))
    three = operands(m=3, v=40)
    found = attend(*map(moved, three), enable_gqa=True)
    for field, expected in enumerated(Case(*three, {})).items():
        if getattr(found, field) is not None:
            torch.testing.assert_close(getattr(found, field).double().cpu(), expected, rtol=1e-5, atol=1e-5, msg=field)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # the interpreter's maximum
@pytest.mark.usefixtures("parts")
def test_nan_stays_in_its_row():
    q, k, v = map(moved, operands(m=3))
    q[0, 1, 2, 3] = torch.nan
    for x in decoding.forward(q, k, v, Sight(), Scoring(0.25)):
        assert x[0, 1, 2].isnan().all()
        assert x.isnan().sum() == x[0, 1, 2].numel()


@pytest.mark.usefixtures("parts")
def test_any_layout_is_read_as_it_is():
    expected = decoding.forward(*(three := list(map(moved, operands()))), Sight(), Scoring(0.25))
    layouts = {
        "a cache that is not full": [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in three],
        "heads last": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in three],
        "rows at odd places": [torch.cat([x, x], -1)[..., 1 : 1 + x.shape[-1]].copy_(x) for x in three],
        "columns first": [x.mT.contiguous().mT for x in three],
    }
    for name, layout in layouts.items():
        found = decoding.forward(*layout, Sight(), Scoring(0.25))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), name


@pytest.mark.usefixtures("parts")
def test_without_keys_every_row_is_empty():
    found = decoding.forward(*map(moved, operands(n=0)), Sight(), Scoring(0.25))
    assert (found.output == 0).all()
    assert (found.log_normalizer == -torch.inf).all()


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.usefixtures("parts")
def test_joining_keeps_the_digits_of_the_variance(shift):
    q, k, v = (t.to(DEVICE) for t in operands())
    q[..., 0], k[..., 0] = 1.0, shift
    ours = decoding.forward(q, k, v, Sight(), Scoring(1.0))
    theirs = blocked.forward(q.double(), k.double(), v.double(), Sight(), Scoring(1.0))
    # The logits themselves are rounded to float32.
    tolerance = 1e-5 + 1e-6 * (shift + 30)
    assert ((ours.logit_variance - theirs.logit_variance).abs() <= tolerance * theirs.logit_variance + 1e-6).all()
    assert ((ours.entropy - theirs.entropy).abs() <= tolerance).all()


def test_parts_fill_the_device_and_are_not_too_small(monkeypatch):
    monkeypatch.setattr(decoding, "_multiprocessors", lambda _: 132)
    everything, window = Scoring(1.0), Scoring(1.0, None, 255, 0)

    def parts(groups, n, scoring=everything):
        return decoding._splits(groups, 1, n, scoring, decoding.Tiling(64, 4, 2, 2), DEVICE)

    assert 132 <= 64 * parts(64, 1 << 15) <= 2 * 132
    assert parts(1, 1 << 20) >= 132
    assert parts(1000, 1 << 15) == 1
    assert parts(1, 100) == 1
    assert parts(1, 1 << 20, window) == parts(1, 256) == 4


def test_calls_leave_the_room_they_share_as_they_found_it(monkeypatch):
    """More parts, fewer, more heads: whatever came before, the programs that have ended are counted from 0."""
    monkeypatch.setattr(decoding, "_multiprocessors", lambda _: 8)
    decoding._call.cache_clear()
    for n, h in ((700, 2), (300, 4), (700, 4), (130, 2), (700, 2)):
        three = [t.to(DEVICE) for t in operands(n=n, h=h, hk=h)]
        found = decoding.forward(*three, Sight(), Scoring(0.25))
        expected = blocked.forward(*(t.double() for t in three), Sight(), Scoring(0.25))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert not any(ended.any() for _, ended in decoding._WORKSPACES.values())
    decoding._call.cache_clear()


def test_results_repeat_bit_for_bit():
    three = [t.to(DEVICE) for t in operands(n=700)]
    first, second = (decoding.forward(*three, Sight(), Scoring(0.25)) for _ in range(2))
    assert isinstance(first, Statistics)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
