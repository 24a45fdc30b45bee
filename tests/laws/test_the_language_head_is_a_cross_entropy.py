"""linear_cross_entropy is cross_entropy of the logits, with its log normaliser and entropy, in blocks and in parts."""

import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import gradlogz as gz
from gradlogz.kernels.losses import vocabulary
from support.distributed_ranks import head_operands, head_rank
from support.measure_registry import Source, seeds
from support.scales import close

linear_cross_entropy = gz.contrastive.linear_cross_entropy
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 1.5},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.3},
    "everything": {"bias": True, "softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.05},
}


def definition(hidden, weight, labels, bias=None, softcap=None, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """Loss, log normaliser and entropy from all logits."""
    s = hidden @ weight.mT
    s = s if bias is None else s + bias
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    G, p = s.logsumexp(-1), s.softmax(-1)
    counted = labels != -100
    losses = cross_entropy(s, labels, label_smoothing=label_smoothing, reduction="none") + z_loss * G.square() * counted
    loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted.sum()}[reduction]
    return loss, G, G - (p * s).sum(-1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of three of the seven tokens."""
    monkeypatch.setattr(vocabulary, "TOKENS", 3)
    monkeypatch.setattr(vocabulary, "logits_at_once", lambda _: 1)


@pytest.mark.parametrize("name", OPTIONS)
@given(seed=seeds, size=st.sampled_from([0.1, 1.0, 10.0]), reduction=st.sampled_from(["mean", "sum", "none"]))
def test_it_is_the_definition_with_its_gradients(name, seed, size, reduction):
    s = Source(seed)
    hidden, weight, bias = (t.requires_grad_() for t in (size * s.normal(7, 3), s.normal(5, 3), s.normal(5)))
    labels = torch.tensor([4, 0, -100, 2, 2, -100, 1])
    options = {**OPTIONS[name], "reduction": reduction}
    operands = [hidden, weight, bias] if options.pop("bias", False) else [hidden, weight]
    options |= {"bias": bias} if len(operands) == 3 else {}
    found, expected = (
        linear_cross_entropy(hidden, weight, labels, **options),
        definition(hidden, weight, labels, **options),
    )
    scale = 1 + float((hidden @ weight.mT).detach().abs().max()) ** 2
    weights = [s.normal(*t.shape) for t in expected]
    for actual, wanted in zip(found, expected, strict=True):
        close(actual, wanted, scale)
    for parts in (1, 3):  # gradients of the loss alone, then of all three
        actual, wanted = (
            sum((w * t).sum() for w, t in zip(weights[:parts], r[:parts], strict=True)) for r in (found, expected)
        )
        for a, b in zip(
            torch.autograd.grad(actual, operands, retain_graph=True),
            torch.autograd.grad(wanted, operands, retain_graph=True),
            strict=True,
        ):
            close(a, b, 100 * scale * (1 + size))


def test_leading_dimensions_and_ignored_tokens():
    s = Source(0)
    hidden, weight = s.normal(2, 3, 4).requires_grad_(), s.normal(6, 4)
    none = linear_cross_entropy(hidden, weight, torch.full((2, 3), -1), ignore_index=-1)
    assert none.entropy.shape == (2, 3)
    assert float(none.loss.detach()) == 0
    assert bool((torch.autograd.grad(none.loss, hidden)[0] == 0).all())


def test_small_losses_keep_their_digits():
    s = Source(1)
    x = s.normal(20, 32)
    x = (5 * x / x.norm(dim=-1, keepdim=True)).float()
    labels = torch.arange(20)
    hidden = x.double().requires_grad_()
    expected = cross_entropy(hidden @ x.double().mT, labels)
    h = x.clone().requires_grad_()
    found = linear_cross_entropy(h, x, labels).loss
    assert 1e-9 < float(expected.detach()) < 1e-3
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    (actual,), (wanted,) = torch.autograd.grad(found, h), torch.autograd.grad(expected, hidden)
    assert float((actual - wanted).norm() / wanted.norm()) < 1e-4


def test_words_without_mass_have_no_part():
    """A bias of -inf, as for the padding of a vocabulary."""
    s = Source(2)
    hidden, weight, labels = s.normal(4, 3).requires_grad_(), s.normal(6, 3), torch.tensor([0, 1, 2, 3])
    bias = torch.tensor([0.0, 0, 0, 0, -torch.inf, -torch.inf], dtype=torch.float64)
    found, expected = (
        linear_cross_entropy(hidden, weight, labels, bias=bias),
        linear_cross_entropy(hidden, weight[:4], labels),
    )
    for actual, wanted in zip(found, expected, strict=True):
        close(actual, wanted, 10.0)
        close(
            torch.autograd.grad(actual.sum(), hidden, retain_graph=True)[0],
            torch.autograd.grad(wanted.sum(), hidden, retain_graph=True)[0],
            10.0,
        )


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_changes_nothing(inside):
    s = Source(3, torch.float32)
    hidden, weight, labels = (
        s.normal(7, 8).bfloat16().requires_grad_(),
        s.normal(9, 8).requires_grad_(),
        torch.arange(7),
    )
    expected = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).loss, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        result = linear_cross_entropy(hidden, weight, labels)
        if inside:
            found = torch.autograd.grad(result.loss, (hidden, weight))
    if not inside:
        found = torch.autograd.grad(result.loss, (hidden, weight))
    assert result.entropy.dtype == torch.float32
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("parts", [1, 3])
def test_it_compiles_into_one_graph(parts):
    s = Source(4)
    labels = torch.tensor([4, 0, -100, 2, 2, -100, 1])

    def total(hidden, weight, bias):
        result = linear_cross_entropy(hidden, weight, labels, bias=bias, softcap=2.0, label_smoothing=0.1, z_loss=0.1)
        return sum(t.square().sum() for t in result[:parts])

    operands = [t.requires_grad_() for t in (s.normal(7, 3), s.normal(5, 3), s.normal(5))]
    expected = total(*operands)
    found = torch.compile(total, fullgraph=True, backend="aot_eager")(*operands)
    close(found, expected, 100.0)
    for actual, wanted in zip(
        torch.autograd.grad(found, operands), torch.autograd.grad(expected, operands), strict=True
    ):
        close(actual, wanted, 100.0)


def test_the_vocabulary_may_be_divided_over_processes(tmp_path):
    """All three results and the gradients of hidden states, of the parts of the weights and of the bias."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(head_rank, (port, str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    hidden, weight, bias, labels, options = head_operands()
    whole = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    expected = torch.autograd.grad(whole.loss + whole.entropy.square().sum(), (hidden, weight, bias))
    for part in parts:
        for actual, wanted in zip(part["result"], whole, strict=True):
            close(actual, wanted.detach(), 10.0)
        close(part["gradients"][0], expected[0], 100.0)
    for index in (1, 2):
        close(torch.cat([part["gradients"][index] for part in parts]), expected[index], 100.0)


def test_half_precision_rounds_the_operands_of_products_only():
    s, precision = Source(3), torch.bfloat16
    hidden, weight, bias = (t.float().requires_grad_() for t in (s.normal(7, 16), s.normal(50, 16), s.normal(50)))
    labels = torch.arange(7) % 5
    result = linear_cross_entropy(hidden, weight, labels, bias=bias, precision=precision)
    rounded = [t.detach().to(precision).float().requires_grad_() for t in (hidden, weight)]
    expected = linear_cross_entropy(*rounded, labels, bias=bias)
    for found, wanted in zip(result, expected, strict=True):
        close(found, wanted, scale=float(wanted.detach().abs().max()), tolerance=1e-6)
    grads = torch.autograd.grad(result.loss, (hidden, weight, bias))
    for found, wanted in zip(grads, torch.autograd.grad(expected.loss, (*rounded, bias)), strict=True):
        close(found, wanted, scale=float(wanted.abs().max()), tolerance=2 * torch.finfo(precision).eps)
