"""The Triton kernels say what the definition in float64 says: on a GPU where there is one, else in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from gradlogz.kernels.attention import gpu, reference
from gradlogz.kernels.attention.reference import Gradients, Statistics
from gradlogz.kernels.attention.scoring import Block, Scoring, Sight, logits, visible
from gradlogz.kernels.attention.segment_spans import SegmentSpans

pytestmark = pytest.mark.usefixtures("bounds_of_loops")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BFLOAT16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton interpreted multiplies its bits")
)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def draw(b=1, h=2, hk=2, m=70, n=70, d=16, v=16, dtype=torch.float32) -> list[torch.Tensor]:
    return [x.to(dtype) for x in (rand(b, h, m, d), rand(b, hk, n, d), rand(b, hk, n, v))]


def defined(query, key, value, sight: Sight, scoring: Scoring) -> Statistics:
    m, n = query.shape[2], key.shape[2]
    seen = visible(sight, scoring, Block(0, m, 0, n), m, n, query.device)
    return reference.statistics(logits(query, key, sight.bias, seen, scoring), value)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, name: str) -> None:
    """Equal where infinite, and the difference small beside the largest entry."""
    theirs = theirs.detach()
    assert ours.shape == theirs.shape
    assert torch.equal(ours.isinf(), theirs.isinf()), name
    ours, theirs = ours.double().nan_to_num(posinf=0, neginf=0), theirs.nan_to_num(posinf=0, neginf=0)
    assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max()), name


def agree(inputs, sight: Sight = Sight(), scoring: Scoring = Scoring(0.3)) -> Statistics:
    """Outputs and statistics, then all gradients of a random combination of them."""
    query, key, value = inputs
    rough = 1e-2 if query.dtype == torch.bfloat16 else 2e-3 if query.dtype == torch.float16 else 1e-5
    ours = gpu.forward(query, key, value, sight, scoring)
    assert ours.output.dtype == query.dtype
    exact = [x.double().requires_grad_() for x in inputs]
    if sight.bias is not None:
        exact.append(sight.bias.double().requires_grad_())
        sight_in_double = sight._replace(bias=exact[3])
    else:
        sight_in_double = sight
    theirs = defined(*exact[:3], sight_in_double, scoring)
    for name, one, other in zip(Statistics._fields, ours, theirs, strict=True):
        close(one, other, rough if name == "output" else 1e-5, name)
    assert (ours.entropy >= 0).all()
    assert (ours.logit_variance >= 0).all()

    alive = ours.log_normalizer != -torch.inf
    grad_output = rand(*ours.output.shape).to(query.dtype)
    grad_G, grad_H, grad_V = rand(3, *alive.shape)
    total = (theirs.output * grad_output).sum() + (theirs.log_normalizer * grad_G)[alive].sum()
    total = total + (theirs.entropy * grad_H).sum() + (theirs.logit_variance * grad_V).sum()
    wanted = torch.autograd.grad(total, exact)
    per_row = gpu.coefficients(ours, Gradients(grad_output, grad_G, grad_H, grad_V, None))
    got = gpu.backward(query, key, value, sight, scoring, per_row, grad_output, needs_bias=sight.bias is not None)
    for name, one, other in zip(("query", "key", "value", "bias"), got, wanted, strict=False):
        close(one, other, 3 * rough, f"gradient of the {name}")
    return ours


BANDS = {
    "all keys": (None, None),
    "causal": (None, 0),
    "strictly causal": (None, -1),
    "a window before": (20, 0),
    "a window around": (9, 30),
    "only later keys": (-2, None),
}


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize(("m", "n"), [(70, 70), (40, 150), (150, 65)])
def test_bands_are_those_of_the_definition(band, m, n):
    agree(draw(m=m, n=n), scoring=Scoring(0.25, None, *band))


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_no_tiling_changes_the_result(monkeypatch, band, size):
    small = (gpu.Tiling(16, size, 4, 2),) * 3
    monkeypatch.setattr(gpu, "TILINGS", dict.fromkeys(gpu.TILINGS, small))
    prepared = gpu._forward_call, gpu._backward_call
    for call in prepared:
        call.cache_clear()
    agree(draw(m=50, n=75), scoring=Scoring(0.25, None, *band))
    for call in prepared:  # they have the small tiles
        call.cache_clear()


def bias(*shape: int) -> torch.Tensor:
    """A bias that forbids every fifth key."""
    return rand(*shape).masked_fill(torch.rand(shape, device=DEVICE) < 0.2, -torch.inf)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) < 0.7


def segments(b: int) -> torch.Tensor:
    return torch.randint(0, 3, (b, 70), device=DEVICE).sort().values


SIGHTS = {
    "bias": lambda: Sight(bias=bias(2, 2, 40, 70)),
    "shared bias": lambda: Sight(bias=bias(1, 1, 1, 70)),
    "mask": lambda: Sight(mask=mask(2, 2, 40, 70)),
    "mask of keys": lambda: Sight(mask=mask(2, 1, 1, 70)),
    "segments": lambda: Sight(segments=segments(2)),
    "all of them": lambda: Sight(bias(1, 2, 40, 70), mask(2, 1, 40, 70), segments(1)),
}


@pytest.mark.parametrize("band", [(None, None), (30, 0)], ids=["all keys", "window"])
@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS.keys())
def test_biases_masks_and_segments_are_those_of_the_definition(sight, band):
    agree(draw(b=2, m=40, n=70), sight(), Scoring(0.25, None, *band))


def documents(*lengths: int) -> torch.Tensor:
    numbers = torch.arange(len(lengths), device=DEVICE)
    return numbers.repeat_interleave(torch.tensor(lengths, device=DEVICE)).unsqueeze(0)


SEGMENTS = {
    "documents": documents(130, 1, 64, 100, 5),
    "one document": documents(300),
    "documents in another order": 7 - documents(64, 128, 108),
    "a document in two parts": documents(80, 90, 130) % 2,
    "interleaved": torch.arange(300, device=DEVICE).unsqueeze(0) % 3,
}


@pytest.mark.parametrize("m", [300, 90], ids=["square", "last queries"])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
def test_no_visible_tile_of_a_segment_is_skipped(segments, m):
    agree(draw(h=1, hk=1, m=m, n=300, dtype=torch.float16), Sight(segments=segments), Scoring(0.25, None, None, 0))


# More tiles of keys than the kernel compares at the same time.
MANY_TILES = documents(130, 1, 64, 500, 5, 400)


@pytest.mark.parametrize(
    ("segments", "m", "rows", "keys"),
    [
        *((segments, m, 32, 64) for segments in SEGMENTS.values() for m in (300, 90)),
        (MANY_TILES, 1100, 128, 32),
        (2 - MANY_TILES % 3, 1100, 128, 32),
    ],
)
def test_spans_of_segments_are_those_of_enumeration(segments, m, rows, keys):
    """Begin and end are the outermost tiles with a visible pair, and inner tiles are visible entirely."""
    n = segments.shape[1]
    spans = SegmentSpans((n - m, m, rows), (0, n, keys)).computed(segments, 0)[0]
    at = torch.arange(n - m, n, device=DEVICE)
    same = (segments[0, at.clamp(min=0), None] == segments[0]) & (at >= 0).unsqueeze(-1)
    increasing = torch.equal(segments.sort().values, segments)
    for tile, (begin, inner, outer, end) in enumerate(spans[0].tolist()):
        own = same[tile * rows : (tile + 1) * rows]
        met = [t for t in range(-(-n // keys)) if own[:, t * keys : (t + 1) * keys].any()]
        if increasing and met:
            assert (begin, end) == (met[0], met[-1] + 1)
        assert begin <= min(met, default=begin)
        assert end >= max(met, default=-1) + 1
        assert own[:, inner * keys : outer * keys].all()
        visible_tiles = [t for t in range(n // keys) if own[:, t * keys : (t + 1) * keys].all()]
        if increasing:
            assert set(visible_tiles) <= set(range(inner, outer))


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16, torch.float32])
@pytest.mark.parametrize(("d", "v"), [(16, 64), (64, 40), (40, 17), (96, 128), (200, 130)])
def test_dtypes_and_head_sizes_keep_their_digits(dtype, d, v):
    agree(draw(m=33, n=70, d=d, v=v, dtype=dtype), scoring=Scoring(d**-0.5, None, None, 0))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_the_softcap_is_that_of_the_definition(softcap):
    agree(draw(m=40), scoring=Scoring(0.5, softcap, None, 0))
    agree(draw(m=40), Sight(bias=bias(1, 2, 1, 70)), Scoring(0.5, softcap))


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_heads_of_a_group_share_their_keys(dtype):
    agree(draw(b=2, h=6, hk=2, m=40, n=50, dtype=dtype), Sight(bias=bias(1, 6, 1, 50)), Scoring(0.25, None, 30, 0))


def test_a_negative_scale_prefers_the_smallest_product():
    agree(draw(m=40), scoring=Scoring(-0.25))


def test_any_layout_is_read_where_it_lies():
    query, key, value = draw(m=50, n=70, v=16)
    per_position = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    odd = [torch.cat([x, x], -1)[..., 1:17] for x in (query, key, value)]
    across = [x.mT.contiguous().mT for x in (query, key, value)]
    repeated = [x[:, :1].expand(1, 2, -1, -1) for x in (query, key, value)]
    for layout in (per_position, odd, across, repeated):
        agree(layout, scoring=Scoring(0.25, None, None, 0))


@pytest.mark.parametrize("size", [1, 129])
def test_single_queries_and_single_keys_are_no_special_case(size):
    agree(draw(h=1, hk=1, m=1, n=size), scoring=Scoring(0.25, None, None, 0))
    agree(draw(h=1, hk=1, m=size, n=1), scoring=Scoring(0.25))


def test_a_row_that_sees_no_key_is_empty_and_has_no_gradient():
    seen = mask(1, 1, 40, 70)
    seen[:, :, 3] = False
    ours = agree(draw(m=40), Sight(mask=seen))
    row = Statistics(*(x[0, 0, 3] for x in ours))
    assert (row.output == 0).all()
    assert (row.log_normalizer, row.entropy, row.logit_variance, row.max_logit) == (-torch.inf, 0, 0, -torch.inf)


def test_without_keys_every_row_is_empty():
    query, key, value = draw(n=0)
    ours = gpu.forward(query, key, value, Sight(), Scoring(0.25))
    assert (ours.output == 0).all()
    assert (ours.log_normalizer == -torch.inf).all()
    per_row = gpu.coefficients(ours, Gradients(ours.output, None, None, None, None))
    grads = gpu.backward(query, key, value, Sight(), Scoring(0.25), per_row, ours.output, needs_bias=False)
    assert all((grad == 0).all() for grad in grads[:3])


def test_nan_stays_in_its_row():
    query, key, value = draw(m=40)
    query[0, 1, 7, 3] = torch.nan
    ours = gpu.forward(query, key, value, Sight(), Scoring(0.25, None, None, 0))
    for x in ours:
        assert x[0, 1, 7].isnan().all()
        assert x.isnan().sum() == x[0, 1, 7].numel()


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_statistics_keep_their_digits_at_any_height_of_the_logits(size, shift):
    query, key, value = draw(m=20, n=150)
    query, key = size * query, key.clone()
    query[..., 0], key[..., 0] = 1.0, shift
    ours = gpu.forward(query, key, value, Sight(), Scoring(1.0))
    theirs = defined(query.double(), key.double(), value.double(), Sight(), Scoring(1.0))
    # The logits themselves are rounded to float32.
    tolerance = 1e-5 + 1e-6 * (shift + 30 * size)
    close(ours.entropy, theirs.entropy, tolerance, "entropy")
    assert ((ours.logit_variance - theirs.logit_variance).abs() <= tolerance * theirs.logit_variance + 1e-6).all()


def test_without_statistics_the_output_is_the_same():
    inputs = draw(m=40, dtype=torch.float16)
    with_them = gpu.forward(*inputs, Sight(), Scoring(0.25, None, None, 0))
    without = gpu.forward(*inputs, Sight(), Scoring(0.25, None, None, 0), statistics=False)
    close(without.output, with_them.output.double(), 2e-3, "output")
    close(without.log_normalizer, with_them.log_normalizer.double(), 1e-5, "log normaliser")
    close(without.max_logit, with_them.max_logit.double(), 1e-5, "largest logit")
    assert (without.entropy == 0).all()
    assert (without.logit_variance == 0).all()


@pytest.mark.parametrize("present", [0, 1, 2, 3, 12, 13, 23, 123])
def test_a_gradient_that_is_missing_is_zero(present):
    """Of log normaliser (1), entropy (2) and variance (3), with and without a gradient of the output."""
    inputs, scoring = draw(m=40), Scoring(0.25, None, None, 0)
    forward = gpu.forward(*inputs, Sight(), scoring)
    grad_output, rows = rand(*forward.output.shape), rand(3, 1, 2, 40)
    there = [str(i + 1) in str(present) for i in range(3)]

    def gradients(output, rows):
        per_row = gpu.coefficients(forward, Gradients(output, *rows, None))
        given = torch.zeros_like(grad_output) if output is None else output
        return gpu.backward(*inputs, Sight(), scoring, per_row, given, needs_bias=False)

    for output in (grad_output, None):
        short = gradients(output, [row if some else None for row, some in zip(rows, there, strict=True)])
        zeros = [row if some else torch.zeros_like(row) for row, some in zip(rows, there, strict=True)]
        full = gradients(torch.zeros_like(grad_output) if output is None else output, zeros)
        for one, other in zip(short[:3], full[:3], strict=True):
            close(one, other.double(), 1e-6, "gradient")


def test_gradients_of_any_layout_are_read_as_they_are():
    """Expanded, transposed and odd addresses: what autograd may pass."""
    inputs, scoring = draw(m=40), Scoring(0.25, None, None, 0)
    forward = gpu.forward(*inputs, Sight(), scoring)
    dense, row = rand(*forward.output.shape), rand(1, 2, 40)
    layouts = {
        "expanded": (dense[:, :, :1, :1].expand_as(dense), row[..., :1].expand_as(row)),
        "transposed": (dense.mT.contiguous().mT, row.mT.contiguous().mT),
        "odd": (torch.cat([dense, dense], -1)[..., 1:17], torch.cat([row, row], -1)[..., 1:41]),
    }
    for name, (grad_output, grad_row) in layouts.items():
        results = []
        for output, rows in ((grad_output, grad_row), (grad_output.contiguous(), grad_row.contiguous())):
            per_row = gpu.coefficients(forward, Gradients(output, rows, rows, rows, None))
            results.append(gpu.backward(*inputs, Sight(), scoring, per_row, output, needs_bias=False))
        for one, other in zip(*results, strict=True):
            if one is not None:
                close(one, other.double(), 1e-6, name)


def test_results_repeat_bit_for_bit():
    inputs, scoring = draw(h=4, m=70, n=140, dtype=torch.float16), Scoring(0.25, None, None, 0)
    first, second = (gpu.forward(*inputs, Sight(), scoring) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
