"""Small losses keep their digits, and autocast and mixed dtypes change nothing: values and gradients."""

import contextlib

import pytest
import torch
from torch.nn.functional import normalize

import gradlogz as gz
from support import contrastive_definitions as contrasts
from support.contrastive_blocks import by_blocks

c = gz.contrastive
LABELS = torch.arange(24) // 2
INDEX = torch.arange(24).roll(5)
NOISE = torch.full((24,), -3.0)

# Every loss that compares pairs, of two batches of 24 vectors.
LOSSES = {
    "info_nce": lambda a, b: gz.info_nce(a, b, temperature=0.05),
    "index": lambda a, b: gz.info_nce(a, b, positive=INDEX, temperature=0.05),
    "vectors": lambda a, b: gz.info_nce(a, b.roll(1, 0), positive=b, temperature=0.05),
    "ids": lambda a, b: gz.info_nce(a, b, ids=LABELS, temperature=0.05),
    "mask": lambda a, b: gz.info_nce(a, b, mask=LABELS.unsqueeze(-1) != LABELS, temperature=0.05),
    "decoupled": lambda a, b: gz.info_nce(a, b, positive=b, decoupled=True, temperature=0.05),
    "n_pair": lambda a, b: c.n_pair(a, b, temperature=0.05),
    "clip": lambda a, b: gz.clip_loss(a, b, temperature=0.05),
    "clip, ids": lambda a, b: gz.clip_loss(a, b, ids=LABELS, temperature=0.05),
    "clip, none": lambda a, b: gz.clip_loss(a, b, temperature=0.05, reduction="none").mean(),
    "nt_xent": lambda a, b: gz.nt_xent(a, b, temperature=0.05),
    "nt_xent, ids": lambda a, b: gz.nt_xent(a, b, ids=LABELS, temperature=0.05),
    "supervised": lambda a, b: gz.supervised_contrastive(a + b, LABELS, temperature=0.05),
    "supervised, inside": lambda a, b: gz.supervised_contrastive(a + b, LABELS, temperature=0.05, mean_inside_log=True),
    "supervised, pair": lambda a, b: gz.supervised_contrastive(a + b, LABELS, temperature=0.05, denominator="pair"),
    "nca": lambda a, b: c.nca(a + b, LABELS, temperature=0.05),
    "siglip": lambda a, b: gz.siglip(a, b, temperature=0.05, offset=-5.0),
    "proxy": lambda a, b: c.proxy_loss(a, b, INDEX, temperature=0.05),
    "skip_gram": lambda a, b: c.skip_gram(a, b, positive=INDEX, negatives=INDEX[:7], temperature=0.05),
    "nce": lambda a, b: c.nce(a, b, positive=INDEX, negatives=INDEX[:7], noise=NOISE, temperature=0.05),
    "ranking_nce": lambda a, b: c.ranking_nce(
        a, b, positive=INDEX, negatives=INDEX.view(-1, 1), noise=NOISE, temperature=0.05
    ),
    "triplet": lambda a, b: c.triplet_loss(a, b, b.roll(1, 0), temperature=0.05),
    "alignment": lambda a, b: c.alignment_loss(a, b),
    "uniformity": lambda a, b: c.uniformity_loss(a + b),
}


COSINES = {
    "info_nce": lambda a, b: gz.info_nce(a, b, normalize=True, temperature=0.1),
    "vectors": lambda a, b: gz.info_nce(a, b.roll(1, 0), positive=b, normalize=True, temperature=0.1),
    "clip": lambda a, b: gz.clip_loss(a, b, normalize=True, temperature=0.1),
    "nt_xent": lambda a, b: gz.nt_xent(a, b, normalize=True, temperature=0.1),
    "supervised": lambda a, b: gz.supervised_contrastive(
        a, LABELS, candidates=b, candidate_labels=LABELS, normalize=True, temperature=0.1
    ),
    "siglip": lambda a, b: gz.siglip(a, b, normalize=True, temperature=0.1),
    "triplet": lambda a, b: c.triplet_loss(a, b, b.roll(1, 0), normalize=True, margin=1.0),
    "soft": lambda a, b: c.soft_info_nce(a, b, torch.eye(24).roll(3, 0), normalize=True, temperature=0.1),
}
# Losses in which the temperature enters more than once.
AT_TEMPERATURE = {
    "info_nce": lambda a, b, T: gz.info_nce(a, b, temperature=T, margin=0.3),
    "nt_xent": lambda a, b, T: gz.nt_xent(a, b, temperature=T, margin=0.3),
    "nt_xent in blocks": lambda a, b, T: gz.nt_xent(a, b, temperature=T, margin=0.3, decoupled=True),
    "supervised": lambda a, b, T: gz.supervised_contrastive(a + b, LABELS, temperature=T),
    "nca": lambda a, b, T: c.nca(a + b, LABELS, temperature=T),
    "siglip": lambda a, b, T: gz.siglip(a, b, temperature=T),
    "triplet": lambda a, b, T: c.triplet_loss(a, b, b.roll(1, 0), temperature=T, margin=0.3),
}


def batch(dtype=torch.float32, noise=1.0):
    g = torch.Generator().manual_seed(0)
    a = torch.randn(24, 16, generator=g)
    b = a + noise * torch.randn(24, 16, generator=g)
    return tuple(normalize(t, dim=-1).to(dtype).requires_grad_() for t in (a, b))


def with_gradients(loss, a, b):
    value = loss(a, b)
    return value.detach(), *torch.autograd.grad(value, (a, b))


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name, inside):
    a, b = batch(torch.bfloat16)
    expected = with_gradients(LOSSES[name], a, b)
    with torch.autocast("cpu", torch.bfloat16):
        if inside:
            found = with_gradients(LOSSES[name], a, b)
        else:
            value = LOSSES[name](a, b)
    if not inside:
        found = value.detach(), *torch.autograd.grad(value, (a, b))
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_dtypes_are_promoted(name):
    """bfloat16 towers beside float32 queues, proxies or other towers; each gradient has the dtype of its tensor."""
    a, b = batch(torch.bfloat16)
    value, grad_a, _ = with_gradients(LOSSES[name], a, b.detach().float().requires_grad_())
    assert value.dtype == torch.float32
    assert grad_a.dtype == torch.bfloat16
    expected = with_gradients(LOSSES[name], a.detach().float().requires_grad_(), b.detach().float().requires_grad_())
    assert torch.equal(value, expected[0])
    assert torch.equal(grad_a, expected[1].bfloat16())


@pytest.mark.parametrize("name", ["info_nce", "vectors", "clip", "nt_xent", "supervised", "siglip", "triplet", "soft"])
def test_cosines_of_mixed_dtypes_have_the_digits_of_the_widest(name):
    a, b = (3 * t.detach() for t in batch())
    narrow, wide = COSINES[name](a.double(), b), COSINES[name](a.double(), b.double())
    assert narrow.dtype == torch.float64
    torch.testing.assert_close(narrow, wide, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "nt_xent in blocks", "supervised", "nca", "siglip", "triplet"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_temperature_in_float32_leaves_float64_losses_their_digits(name, shape):
    a, b = (t.detach().double().requires_grad_() for t in batch())
    T = torch.full(shape, 0.1, requires_grad=True)
    exact = T.detach().double().reshape(()).requires_grad_()
    with by_blocks() if name.endswith("blocks") else contextlib.nullcontext():
        found = AT_TEMPERATURE[name](a, b, T), AT_TEMPERATURE[name](a, b, exact)
        slopes = [torch.autograd.grad(v, (a, t)) for v, t in zip(found, (T, exact), strict=True)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=0)
    torch.testing.assert_close(slopes[0][0], slopes[1][0], rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(slopes[0][1].double().reshape(()), slopes[1][1], rtol=1e-7, atol=0)


def test_log_weights_may_be_half_precision_with_normalize():
    a, _ = batch(torch.bfloat16)
    weights = torch.linspace(-1, 1, 24).bfloat16()
    found = gz.info_nce(a, a, log_weights=weights, normalize=True, temperature=0.1)
    expected = gz.info_nce(a.float(), a.float(), log_weights=weights.float(), normalize=True, temperature=0.1)
    assert torch.equal(found, expected)
    assert gz.clip_loss(a, a, log_weights=weights, normalize=True).dtype == torch.float32


def solved(classes, scale):
    """Two views of 24 points, or of 12 classes of two equal points, in float64 numbers that float32 holds."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(24, 64, generator=g, dtype=torch.float64)
    x = x[::2].repeat_interleave(2, 0) if classes else x
    x = scale * x / x.norm(dim=-1, keepdim=True)
    y = x if classes else x + 0.01 * scale * torch.randn(24, 64, generator=g, dtype=torch.float64)
    return (t.float().double().requires_grad_() for t in (x, y))


# name: ours, the definition, whether points are in classes of two, and the length of the vectors.
SMALL = {
    "info_nce": (gz.info_nce, contrasts.info_nce, False, 5.0),
    "index": (
        lambda a, b: gz.info_nce(a, b[INDEX], positive=INDEX.argsort()),
        contrasts.info_nce,
        False,
        5.0,
    ),
    "vectors": (
        lambda a, b: gz.info_nce(a, b, mask=~torch.eye(24).bool(), positive=b),
        contrasts.info_nce,
        False,
        5.0,
    ),
    "clip": (gz.clip_loss, contrasts.clip, False, 5.0),
    "clip, none": (lambda a, b: gz.clip_loss(a, b, reduction="none").mean(), contrasts.clip, False, 5.0),
    "nt_xent": (gz.nt_xent, contrasts.nt_xent, False, 5.0),
    "proxy": (
        lambda a, b: c.proxy_loss(a, b[INDEX], INDEX.argsort()),
        contrasts.info_nce,
        False,
        5.0,
    ),
    "siglip": (
        lambda a, b: gz.siglip(a, b, offset=-30.0),
        lambda a, b, T: contrasts.bernoulli(a, b, T, -30.0),
        False,
        7.0,
    ),
    "supervised": (
        lambda a, b: gz.supervised_contrastive(a + b, LABELS),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T),
        True,
        2.5,
    ),
    "supervised, inside": (
        lambda a, b: gz.supervised_contrastive(a + b, LABELS, mean_inside_log=True),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T, inside=True),
        True,
        2.5,
    ),
    "supervised, pair": (
        lambda a, b: gz.supervised_contrastive(a + b, LABELS, denominator="pair"),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T, pair=True),
        True,
        2.5,
    ),
    "nca": (
        lambda a, b: c.nca(a + b, LABELS),
        lambda a, b, T: contrasts.nca(a + b, LABELS, T),
        True,
        1.5,
    ),
}


@pytest.mark.parametrize("divided", [False, True], ids=["one matrix", "blocks"])
@pytest.mark.parametrize("name", SMALL)
def test_small_losses_keep_their_digits(name, divided):
    """A batch that is solved: float32 has four digits of losses of 1e-5 and less, and of their gradients."""
    ours, definition, classes, scale = SMALL[name]
    a, b = solved(classes, scale)
    expected = with_gradients(lambda x, y: definition(x, y, 1.0), a, b)
    with by_blocks() if divided else contextlib.nullcontext():
        found = with_gradients(ours, *(t.detach().float().requires_grad_() for t in (a, b)))
        value = ours(*(t.detach().float() for t in (a, b)))  # without a graph
    assert float(value) == pytest.approx(float(expected[0]), rel=1e-4)
    assert 1e-11 < float(expected[0]) < 1e-4
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-4)
    for actual, wanted in zip(found[1:], expected[1:], strict=True):
        assert float((actual.double() - wanted).norm() / wanted.norm()) < 1e-4


def test_anchors_without_negatives_have_no_loss_and_no_gradient():
    a, b = (torch.randn(1, 8, requires_grad=True) for _ in range(2))
    for loss in (gz.info_nce, gz.clip_loss, gz.nt_xent):
        value, *gradients = with_gradients(lambda x, y, loss=loss: loss(x, y, temperature=1e-2), a, b)
        assert float(value) == 0
        assert all(bool((g == 0).all()) for g in gradients)
    x, y = batch()
    hidden = gz.info_nce(x, y, ids=torch.zeros(24, dtype=torch.long), temperature=1e-3, reduction="none")
    assert bool((hidden == 0).all())


@pytest.mark.parametrize("excluded_by", ["log_weights", "bias"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_candidates_without_weight_are_no_negatives(excluded_by, decoupled):
    """Loss and gradients are those without the candidates of weight 0, also for anchors that have no others."""
    a, b = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (3, 6))
    count = 3 if decoupled else 1  # a decoupled loss needs negatives
    weights = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.arange(count, 6), -torch.inf)
    options = {"log_weights": weights} if excluded_by == "log_weights" else {"bias": weights.expand(3, 6)}
    positive = torch.zeros(3, dtype=torch.long)
    value, of_a, of_b = with_gradients(
        lambda x, y: gz.info_nce(x, y, positive=positive, decoupled=decoupled, **options), a, b
    )
    expected, *wanted = with_gradients(
        lambda x, y: gz.info_nce(x, y[:count], positive=positive, decoupled=decoupled), a, b
    )
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close((of_a, of_b), tuple(wanted), rtol=0, atol=1e-12)


def test_equal_points_have_distance_zero_and_no_gradient():
    x = torch.randn(4, 3, requires_grad=True)
    for exponent in (0.5, 1.0, 1.5, 2.0, 3.0):
        loss = c.alignment_loss(x, x.detach(), exponent=exponent)
        assert float(loss.detach()) == 0
        assert bool((torch.autograd.grad(loss, x)[0] == 0).all())


def test_a_learned_temperature_returns_from_its_minimum():
    module = c.Contrastive("info_nce", 0.011, True, minimum=0.01, normalize=True)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    a = torch.eye(6)
    for target, reached in ((a, 0.01), (a.roll(1, 0), 0.02)):  # solved, so colder; wrong, so warmer
        for _ in range(50):
            optimizer.zero_grad()
            loss = module(a, target) + (0 if reached > 0.01 else 1.0) * module.log_temperature
            loss.backward()
            optimizer.step()
        if reached == 0.01:
            assert float(module.temperature.detach()) == pytest.approx(0.01)
    assert float(module.temperature.detach()) > reached


def test_siglip_learns_its_scale_and_offset():
    a, b = (torch.randn(6, 8) for _ in range(2))
    module = c.SigLIP()
    expected = gz.siglip(a, b, temperature=0.1, offset=-10.0, normalize=True)
    assert float((module(a, b) - expected).detach().abs()) < 1e-5
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    before = float(module(a, a).detach())
    for _ in range(50):
        optimizer.zero_grad()
        module(a, a).backward()
        optimizer.step()
    assert float(module(a, a).detach()) < before / 2
