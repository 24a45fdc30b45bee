"""z_loss, entropy_loss and logit_variance_loss equal definitions written out over logits, row by row."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradlogz
from gradlogz.attention import entropy_loss, logit_variance_loss, z_loss
from support.architectures import ARCHITECTURES
from support.small_trainings import GPT, batches

FLOOR, CEILING = 1.1, 1.2
LOSSES = {
    "z": z_loss,
    "floor": lambda a, **o: entropy_loss(a, floor=FLOOR, **{"coefficient": 1e-4, **o}),
    "band": lambda a, **o: entropy_loss(a, floor=FLOOR, ceiling=CEILING, **{"coefficient": 1e-4, **o}),
    "variance": logit_variance_loss,
}


def operands(b=2, h=3, m=7, d=5):
    generator = torch.Generator().manual_seed(0)
    heads = torch.tensor([0.3, 1.0, 3.0]).reshape(h, 1, 1)  # a flat head, an ordinary one, and one that collapses
    return heads * torch.randn(3, b, h, m, d, dtype=torch.float64, generator=generator)


def written_out(name, q, k, visible, counted, coefficient=1e-4):
    """Loop over batch, heads and rows; visible [b, m, n], counted [b, m]."""
    squares, variances, entropies = [], [], {}
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for m in range(q.shape[2]):
                keys = visible[b, m].nonzero()[:, 0]
                if len(keys) == 0 or not counted[b, m]:
                    continue
                s = k[b, h, keys] @ q[b, h, m] / math.sqrt(q.shape[-1])
                p = s.exp() / s.exp().sum()
                squares.append(s.exp().sum().log() ** 2)
                variances.append((p * (s - (p * s).sum()) ** 2).sum())
                entropies.setdefault(h, []).append(-(p * p.log()).sum())
    means = [torch.stack(rows).mean() for rows in entropies.values()]
    low = [max(FLOOR - mean, mean * 0) ** 2 for mean in means]
    high = [max(mean - CEILING, mean * 0) ** 2 for mean in means]
    terms = {"z": squares, "variance": variances, "floor": low}
    terms["band"] = [a + b for a, b in zip(low, high, strict=True)]
    return coefficient * torch.stack(terms[name]).mean()


def masks(kind, b=2, m=7):
    """Options of attend, the keys that are visible, and the rows that count."""
    visible, counted = torch.ones(b, m, m, dtype=torch.bool), torch.ones(b, m, dtype=torch.bool)
    if kind == "causal":
        return {"is_causal": True}, visible.tril(), counted
    if kind == "packed":
        segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])
        visible = (segments.unsqueeze(-1) == segments.unsqueeze(-2)).tril()
        return {"is_causal": True, "segments": segments}, visible, counted
    if kind == "rows without keys":
        visible[0, :2], visible[1, :, 3:] = False, False
        return {"attn_mask": visible.unsqueeze(1)}, visible, counted
    counted[1, 4:] = False  # padding on the right, whose rows see keys
    return {"is_causal": True}, visible.tril(), counted


@pytest.mark.parametrize("kind", ["causal", "packed", "rows without keys", "padding"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients_equal_the_definition(name, kind):
    options, visible, counted = masks(kind)
    q, k, v = (t.clone().requires_grad_() for t in operands())
    mask = None if bool(counted.all()) else counted
    ours = LOSSES[name](gradlogz.attend(q, k, v, **options), query_mask=mask)
    theirs = written_out(name, q, k, visible, counted)
    assert abs(ours - theirs) < 1e-12 * abs(theirs)
    for a, b in zip(torch.autograd.grad(ours, (q, k)), torch.autograd.grad(theirs, (q, k)), strict=True):
        assert (a - b).abs().max() < 1e-12 * b.abs().max()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    q, k, v = (t[:, :2, :4].clone().requires_grad_() for t in operands())
    options = {"attn_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()}
    k, v = k[..., :4, :].detach().requires_grad_(), v[..., :4, :].detach()

    def loss(q, k):
        return LOSSES[name](gradlogz.attend(q[..., :4, :], k, v, **options), coefficient=1.0)

    assert torch.autograd.gradcheck(loss, (q[..., :4, :].detach().requires_grad_(), k))


def test_the_most_negative_number_in_a_mask_hides_a_row():
    q, k, v = (t.float().requires_grad_() for t in operands())
    hidden = torch.zeros(7, 7)
    hidden[:2] = torch.finfo(torch.float32).min
    masked, part = gradlogz.attend(q, k, v, attn_mask=hidden), gradlogz.attend(q[:, :, 2:], k, v)
    for loss in LOSSES.values():
        assert torch.allclose(loss(masked), loss(part), rtol=1e-6)
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss(masked), (q, k), retain_graph=True))


def test_no_row_at_all_is_no_loss():
    q, k, v = operands().requires_grad_()
    nothing = gradlogz.attend(q, k, v, attn_mask=torch.zeros(7, 7, dtype=torch.bool))
    assert all(loss(nothing) == 0 for loss in (z_loss, logit_variance_loss, LOSSES["band"]))


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_model_is_the_mean_of_its_layers(name):
    torch.manual_seed(0)
    model, ids = GPT(dropout=0.0).double(), batches(1)[0]
    for block in model.blocks:
        block.attention.qkv.weight.data *= 6
    with gradlogz.observe(model) as observation:
        model(ids)
    layers = [LOSSES[name](layer) for layer in observation.values()]
    assert len(layers) == 2
    together = LOSSES[name](observation)
    assert abs(together - sum(layers) / 2) <= 1e-14 * abs(together)
    weights = [block.attention.qkv.weight for block in model.blocks]
    assert all(bool(g.any()) for g in torch.autograd.grad(together, weights))


def test_the_attention_mask_of_a_batch_leaves_padding_out():
    """A padded sequence beside a long one has the loss of the two by themselves."""
    architecture = next(a for a in ARCHITECTURES if a.name == "llama")
    model, inputs = architecture.build().double(), architecture.inputs("right")
    mask, ids = inputs["attention_mask"].bool(), inputs["input_ids"]

    def squares(tokens):
        with gradlogz.observe(model) as observation:
            model(input_ids=tokens)
        return observation.stack("log_normalizer").square()

    parts = [squares(ids[i : i + 1, : int(mask[i].sum())]) for i in range(2)]
    expected = 1e-4 * sum(p.sum() for p in parts) / sum(p.numel() for p in parts)
    with gradlogz.observe(model) as observation:
        model(**inputs)
    assert abs(z_loss(observation, query_mask=inputs["attention_mask"]) - expected) < 1e-12 * expected


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_rows_that_are_not_numbers_is_not_a_number(name):
    q, k, v = operands()
    q[0, 1, 2] = torch.nan
    assert LOSSES[name](gradlogz.attend(q, k, v)).isnan()


def test_rows_hidden_by_the_least_number_of_float16_do_not_count():
    q, k, v = operands()
    mask = torch.zeros(7, 7, dtype=torch.float64)
    mask[:2] = torch.finfo(torch.float16).min
    expected = 1e-4 * gradlogz.attend(q, k, v).log_normalizer[:, :, 2:].square().mean()
    assert abs(z_loss(gradlogz.attend(q, k, v, attn_mask=mask)) - expected) < 1e-12 * expected


class Synchronisations(TorchDispatchMode):
    """Operators that wait for the device or whose result has a size that depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._opname not in ("_local_scalar_dense", "nonzero", "masked_select", "index"), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_wait_for_the_device(name):
    options, _, counted = masks("padding")
    attention = gradlogz.attend(*operands(), **options)
    attention = gradlogz.attention.Attention(*(None if t is None else t.requires_grad_() for t in attention))
    with Synchronisations():
        LOSSES[name](attention, query_mask=counted).backward()
