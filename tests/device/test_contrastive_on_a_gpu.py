"""Contrastive losses on a GPU are those of their definitions in float64, of linear memory, and say what is wrong."""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

import gradlogz as gz
from support import contrastive_definitions as contrasts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LABELS = torch.arange(70) % 20
WEIGHTS = torch.randn(70, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def masked(a, b, T):
    seen = (LABELS.unsqueeze(-1) != LABELS) | torch.eye(70, dtype=torch.bool)
    return cross_entropy((a @ b.mT / T).masked_fill(~seen, -torch.inf), torch.arange(70))


# name: ours and the definition, of two batches of 70 vectors and a temperature.
LOSSES = {
    "info_nce": (lambda a, b, T: gz.info_nce(a, b, temperature=T), contrasts.info_nce),
    "weighted": (
        lambda a, b, T: gz.info_nce(a, b, temperature=T, log_weights=WEIGHTS.to(a)),
        lambda a, b, T: cross_entropy(a @ b.mT / T + WEIGHTS, torch.arange(70)),
    ),
    "ids": (lambda a, b, T: gz.info_nce(a, b, temperature=T, ids=LABELS.to(a.device)), masked),
    "clip": (lambda a, b, T: gz.clip_loss(a, b, temperature=T), contrasts.clip),
    "nt_xent": (lambda a, b, T: gz.nt_xent(a, b, temperature=T), contrasts.nt_xent),
    "decoupled": (
        lambda a, b, T: gz.nt_xent(a, b, temperature=T, decoupled=True),
        lambda a, b, T: contrasts.nt_xent(a, b, T, decoupled=True),
    ),
    "supervised": (
        lambda a, b, T: gz.supervised_contrastive(a + b, LABELS.to(a.device), temperature=T),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T),
    ),
    "nca": (
        lambda a, b, T: gz.contrastive.nca(a + b, LABELS.to(a.device), temperature=T),
        lambda a, b, T: contrasts.nca(a + b, LABELS, T),
    ),
    "uniformity": (
        lambda a, b, T: gz.contrastive.uniformity_loss(a + b, sharpness=1 / T),
        lambda a, b, T: contrasts.uniformity(a + b, 1 / T),
    ),
    "bernoulli": (
        lambda a, b, T: gz.siglip(a, b, temperature=T, offset=-0.5),
        lambda a, b, T: contrasts.bernoulli(a, b, T, -0.5),
    ),
}


@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_the_definition(name, dtype, temperature):
    g = torch.Generator().manual_seed(0)
    a, b = (normalize(torch.randn(70, 32, generator=g, dtype=torch.float64), dim=-1) for _ in range(2))
    ours, definition = LOSSES[name]

    def found(loss, *vectors):
        vectors = [v.clone().requires_grad_() for v in vectors]
        value = loss(*vectors, temperature)
        return [t.detach().cpu().double() for t in (value, *torch.autograd.grad(value, vectors))]

    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    expected = found(definition, a, b)
    for actual, wanted in zip(found(ours, a.to("cuda", dtype), b.to("cuda", dtype)), expected, strict=True):
        scale = float(wanted.abs().max()) + 1e-3
        torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance / temperature * scale * 10)


@pytest.mark.parametrize("dimension", [64, 320])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["info_nce", "clip_loss", "nt_xent", "siglip", "supervised_contrastive"])
def test_vectors_may_meet_in_half_precision(name, precision, dimension):
    a, b = (normalize(torch.randn(3000, dimension, device="cuda"), dim=-1).requires_grad_() for _ in range(2))
    loss = getattr(gz.contrastive, name)

    def value(half):
        if name == "supervised_contrastive":
            return loss(a + b, torch.arange(3000, device="cuda") // 4, temperature=0.2, precision=half)
        return loss(a, b, temperature=0.1, precision=half)

    exact, found = value(None), value(precision)
    assert abs(float(found.detach() - exact.detach())) < 0.02 * max(1.0, float(exact.detach()))
    for actual, expected in zip(torch.autograd.grad(found, (a, b)), torch.autograd.grad(exact, (a, b)), strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 0.02


def test_the_kernels_of_tiles_are_used_in_bfloat16():
    a, b = (torch.randn(300, 64, device="cuda", requires_grad=True) for _ in range(2))
    loss = gz.info_nce(a, b, precision=torch.bfloat16)
    assert type(loss.grad_fn).__name__ == "_CompiledSumBackward"


def test_a_language_head_multiplies_in_half_precision():
    hidden, weight = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (500, 3000))
    labels = torch.randint(3000, (500,), device="cuda")
    losses = [
        gz.contrastive.linear_cross_entropy(0.2 * hidden, weight, labels, precision=p).loss
        for p in (torch.bfloat16, None)
    ]
    assert abs(float(losses[0].detach() - losses[1].detach())) < 0.01
    half, expected = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    for actual, wanted in zip(half, expected, strict=True):
        assert float((actual - wanted).norm() / wanted.norm()) < 0.02


def test_second_derivatives_are_those_of_the_cpu():
    a, b = torch.randn(40, 32, dtype=torch.float64), torch.randn(40, 32, dtype=torch.float64)

    def second(x, y):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(gz.info_nce(x, y, temperature=2.0), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].cpu()

    torch.testing.assert_close(second(a.cuda(), b.cuda()), second(a, b), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "ids"])
def test_memory_is_linear(name):
    """At 40 000 vectors one matrix of logits would be 6 GiB; blocks that compare labels are 256 MiB each."""
    n, d = 40_000, 32
    a, b = (torch.randn(n, d, device="cuda", requires_grad=True) for _ in range(2))
    options = {"ids": torch.arange(n, device="cuda") % 1000} if name == "ids" else {}
    loss = gz.nt_xent if name == "nt_xent" else gz.info_nce
    few = {key: each[:500] for key, each in options.items()}
    torch.autograd.grad(loss(a[:500], b[:500], temperature=5.0, **few), (a, b))  # kernels are compiled and checked
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(loss(a, b, temperature=5.0, **options), (a, b))
    used = torch.cuda.max_memory_allocated() - before
    assert used < (3 << 30 if name == "ids" else 40 * 4 * n * d)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    """A call that waited would raise in this mode."""
    a, b = (torch.randn(64, 32, device="cuda", requires_grad=True) for _ in range(2))
    module = gz.contrastive.Contrastive("clip_loss", temperature=0.1, learn_temperature=True).cuda()
    module(a, b).backward()  # compiled once
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(a, b).backward()
        gz.nt_xent(a, b, temperature=0.1, normalize=True).backward()
        gz.siglip(a, b, temperature=0.1, offset=-5.0).backward()
        gz.supervised_contrastive(a, torch.arange(64, device="cuda") // 2, temperature=0.1).backward()
        gz.info_nce(a, b, ids=torch.arange(64, device="cuda") // 2).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(a.grad.isfinite().all())
    assert bool(b.grad.isfinite().all())


def test_devices_are_not_mixed():
    a = torch.randn(4, 16)
    with pytest.raises(ValueError, match="one device"):
        gz.info_nce(a.cuda(), a)
    with pytest.raises(ValueError, match=r"ids.*device"):
        gz.info_nce(a.cuda(), a.cuda(), ids=torch.arange(4))


def test_a_queue_moves_with_its_model():
    queue = gz.contrastive.Queue(6, 16).cuda()
    queue.put(torch.randn(8, 16, device="cuda"))
    a, key = torch.randn(4, 16, device="cuda"), torch.randn(4, 16, device="cuda")
    logits = torch.cat([(a * key).sum(-1, keepdim=True), a @ queue.candidates.mT], -1)
    expected = cross_entropy(logits, torch.zeros(4, dtype=torch.long, device="cuda"))
    torch.testing.assert_close(gz.info_nce(a, queue.candidates, positive=key), expected, rtol=1e-4, atol=1e-4)
