"""Derivatives compute the weights exp(logit - log normaliser) again: they sum to one, however large the logits.

A logit of 1e7 is rounded to about 1 in float32, and so is the log normaliser. The weights sum to one only if the logits
are rounded alike, though one kernel may compute few queries forward, another one backward, and if the sum of masses is
not taken from the log normaliser.
"""

import pytest
import torch

from gradlogz import attend
from gradlogz.kernels.attention import dispatch

SIZES = [1.0, 1e2, 1e4, 1e7, 1e9, 1e14, 1e20, 1e30]
CALLS = {
    "plain": {}, "causal": {"is_causal": True}, "soft cap": {"softcap": 1e6}, "window": {"window": (5, 3)},
    "without statistics": {"statistics": "none"}, "half": {"dtype": torch.bfloat16},
}  # fmt: skip


def operands(m, n, size, dtype):
    """Queries and keys whose logits are of this size."""
    generator = torch.Generator().manual_seed(m * n)
    q, k, v = (torch.randn(2, 2, tokens, 16, generator=generator) for tokens in (m, n, n))
    return [t.to(dtype).requires_grad_() for t in (q * size**0.5, k * size**0.5, v)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("m", "n"), [(1, 9), (5, 9), (1, 300), (6, 300), (7, 300), (40, 90)])
def test_the_weights_sum_to_one_and_gradients_are_finite(m, n, name, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(dispatch, "kernel_module", lambda *_: None)
    options = dict(CALLS[name])
    dtype = options.pop("dtype", torch.float32)
    for size in SIZES:
        q, k, v = operands(m, n, size, dtype)
        a = attend(q, k, v, **options)
        # The gradient of sum_m output_m in a value is the sum of its weights.
        (weights,) = torch.autograd.grad(a.output.sum(), v, retain_graph=True)
        # The log normaliser itself is rounded; from 1e7 on, rows without a soft cap have one key of weight 1.
        G = float(a.log_normalizer.detach().abs().max())
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] + (1.2e-7 * G if G < 2e6 else 0.0)
        assert (weights.double().sum(-2) / m - 1).abs().max() < rounding, size
        total = a.log_normalizer.sum() / size**0.5
        if a.entropy is not None:
            total = total + a.entropy.sum() + a.output.sum() + a.max_logit.sum() / size
        for gradient in torch.autograd.grad(total, (q, k)):
            assert gradient.isfinite().all(), size


@pytest.mark.parametrize("size", [*SIZES, "finite mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weights_of_forward_mode_sum_to_one(size, dtype):
    """The tangent of the output is a mean of those of the values, also in a row that a finite mask hides."""
    q, k, v = (t.detach() for t in operands(5, 90, 1.0 if size == "finite mask" else size, dtype))
    mask = torch.full((5, 90), torch.finfo(dtype).min if size == "finite mask" else 0.0, dtype=dtype)
    _, tangent = torch.func.jvp(lambda v: attend(q, k, v, attn_mask=mask).output, (v,), (torch.ones_like(v),))
    assert (tangent - 1).abs().max() < 1e-5


def planted(m, n, exponent):
    """Queries and keys with logits 2^exponent - j, all exact in float32, where j is a multiple of the spacing there.

    Most j are 0: the log normaliser lies above the largest logit by less than its rounding, as the mean below it.
    """
    spacing = 2.0 ** max(0, exponent - 23)
    j = spacing * (torch.arange(n) % 4 == 3) * (torch.arange(n) % 3)
    key = torch.stack([torch.ones(n), -j], -1).expand(1, 2, n, 2)
    query = torch.tensor([2.0**exponent, 1.0]).expand(1, 2, m, 2)
    value = torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(0))
    return query, key, value


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"statistics": "none"}, {"bias": 0.0}], ids=str)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("m", "n"), [(1, 9), (5, 300), (7, 300), (90, 90)])
def test_ties_of_large_logits_share_their_weight(m, n, compiled, options, monkeypatch):
    if compiled:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(dispatch, "kernel_module", lambda *_: None)
    for exponent in (8, 20, 23, 26, 30):
        found = []
        for dtype in (torch.float32, torch.float64):
            q, k, v = (t.to(dtype).clone().requires_grad_() for t in planted(m, n, exponent))
            masks = {"bias": torch.zeros(m, n, dtype=dtype)} if "bias" in options else {}
            a = attend(q, k, v, scale=1.0, **options | masks)
            (weights,) = torch.autograd.grad(a.output.sum(), v, retain_graph=True)
            loss = a.output.square().sum() + a.log_normalizer.sum()
            if a.entropy is not None:
                loss = loss + a.entropy.sum() + 0.3 * a.logit_variance.sum()
            of_query, of_key = torch.autograd.grad(loss, (q, k))
            found.append((weights, of_query, of_key[..., 0] / 2.0**exponent, of_key[..., 1]))
        for actual, expected in zip(*found, strict=True):
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5 * scale, msg=f"2^{exponent}")


@pytest.mark.parametrize("statistics", ["none", "scalar"])
@pytest.mark.parametrize(("m", "n"), [(1, 9), (6, 300), (7, 300)])
def test_gradients_of_separated_logits_are_those_of_float64(m, n, statistics):
    """One key has the largest logit by far more than its rounding; every weight is 0 or 1."""
    for size in SIZES[3:]:
        q, k, v = operands(m, n, size, torch.float32)
        with torch.no_grad():
            logits = q.double() @ k.double().mT / 4
            top = logits.topk(2, -1).values
            q.masked_fill_(((top[..., 0] - top[..., 1]) < 1e-4 * size).unsqueeze(-1), 0.0)
            winner = torch.softmax(q.double() @ k.double().mT / 4, -1)
        a = attend(q, k, v, statistics=statistics)
        (grad_v,) = torch.autograd.grad(a.output.sum(), v, retain_graph=True)
        (grad_q,) = torch.autograd.grad(a.log_normalizer.sum() / size**0.5, q)
        torch.testing.assert_close(grad_v.double(), winner.sum(-2).unsqueeze(-1).expand_as(v), rtol=1e-5, atol=1e-5)
        mean = (winner @ k.double()) / 4 / size**0.5
        separated = q.detach().abs().sum(-1) > 0
        torch.testing.assert_close(grad_q.double()[separated], mean[separated], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("m", "n"), [(1, 9), (6, 300), (7, 300)])
def test_gradients_of_moderate_logits_are_those_of_float64(m, n):
    for size in SIZES[:3]:
        single = operands(m, n, size, torch.float32)
        double = [t.detach().double().requires_grad_() for t in single]
        found = []
        for q, k, v in (single, double):
            a = attend(q, k, v)
            loss = a.output.square().sum() + a.log_normalizer.sum() / size**0.5 + a.entropy.sum() / size**0.5
            found.append(torch.autograd.grad(loss, (q, k, v)))
        for actual, expected in zip(*found, strict=True):
            scale = float(expected.abs().max())
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6 * size * max(1.0, scale))
