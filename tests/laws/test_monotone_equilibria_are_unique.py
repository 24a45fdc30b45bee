"""Certified maps have one fixed point: all starts and methods reach it; where the certificate fails there may be three.

Oracles: the Jacobian by autograd, active sets by enumeration, unrolled steps for gradients.   [winston20]
"""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import nn

from gradlogz.dynamics import (
    Certificate,
    EquilibriumAttention,
    MonotoneAttention,
    attention_certificate,
    equilibrium,
    monotone_equilibrium,
)
from gradlogz.dynamics.monotone import PROXES, diameter, prefix_diameters
from support.scales import close

F64 = torch.float64
seeds = st.integers(0, 10_000)
METHODS = ["forward_backward", "peaceman_rachford"]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def attention_map(keys, values, u, beta, tau):
    return lambda x: u + tau * (beta * x @ keys.mT).softmax(-1) @ values


def test_the_diameter_is_the_largest_distance(monkeypatch):
    monkeypatch.setattr("gradlogz.dynamics.monotone.PAIRS", 40)
    points = drawn(0, 3, 2, 17, 4).requires_grad_()
    expected = (points.unsqueeze(-2) - points.unsqueeze(-3)).norm(dim=-1).amax((-2, -1))
    close(diameter(points), expected, 10.0)
    found, wanted = (
        torch.autograd.grad(t.sin().sum(), points, retain_graph=True)[0] for t in (diameter(points), expected)
    )
    close(found, wanted, 10.0)
    close(diameter(torch.ones(5, 3, dtype=F64)), torch.zeros((), dtype=F64))


@given(seed=seeds, tied=st.booleans(), beta=st.sampled_from([0.8, -0.8]), tau=st.sampled_from([-2.0, -0.5, 0.3, 1.0]))
def test_the_bounds_hold_at_every_point(seed, tied, beta, tau):
    """Smallest eigenvalue of the symmetric part, and largest singular value, of I - J; by autograd, at many points."""
    keys = drawn(seed, 5, 3)
    values = keys if tied else drawn(seed + 1, 5, 3)
    certificate = attention_certificate(keys, None if tied else values, beta=beta, tau=tau)
    F = attention_map(keys, values, torch.zeros(3, dtype=F64), beta, tau)
    x = 2 * drawn(seed + 2, 100, 3)
    A = torch.eye(3, dtype=F64) - torch.func.vmap(torch.func.jacrev(F))(x)
    smallest = torch.linalg.eigvalsh((A + A.mT) / 2).amin()
    assert float(smallest) >= float(certificate.monotonicity) - 1e-12
    assert float(torch.linalg.matrix_norm(A, 2).amax()) <= float(certificate.lipschitz) + 1e-12
    assert certificate.symmetric == tied
    if tied:
        close(A, A.mT, 10.0)


def test_only_the_sign_of_tau_beta_matters():
    """Keys at 1 and -1 with beta = -4 and tau = -1: x = tanh(4 x) has three fixed points, so none is certified."""
    keys = torch.tensor([[1.0], [-1.0]], dtype=F64)
    for values in (None, keys):
        negative, positive = (attention_certificate(keys, values, beta=4.0 * s, tau=s) for s in (-1.0, 1.0))
        assert negative == positive
        assert not bool(negative.unique)
    assert bool(attention_certificate(keys, beta=-4.0, tau=1.0).unique)
    empty = attention_certificate(keys[:0])
    close(empty.monotonicity, torch.ones((), dtype=F64))


def test_the_condition_is_sharp():
    """Keys at a and -a: x = a tanh(beta a x) has one solution up to beta a² = 1 and three from there on."""
    keys, u = torch.tensor([[1.0], [-1.0]], dtype=F64), torch.zeros(1, dtype=F64)
    starts = torch.linspace(-2, 2, 41, dtype=F64).unsqueeze(-1)
    for beta, count in ((0.95, 1), (1.3, 3)):
        certificate = attention_certificate(keys, beta=beta)
        close(certificate.monotonicity, torch.tensor(1 - beta, dtype=F64))
        assert bool(certificate.unique) == (count == 1)
        found = equilibrium(attention_map(keys, keys, u, beta, 1.0), starts, method="iterate", max_iterations=5000)
        clusters = found.state.round(decimals=4).unique()
        assert len(clusters) == count
    root = brentq(lambda x: x - torch.tensor(1.3 * x).tanh().item(), 0.1, 2.0, xtol=1e-14)
    assert abs(float(found.state[-1]) - root) < 1e-7


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tau", [0.9, -4.0])
@pytest.mark.parametrize("prox", PROXES)
def test_all_starts_end_at_one_point(method, tau, prox):
    """A certified ascent, and a descent of any size, under every prox."""
    keys, u = drawn(0, 6, 3), drawn(1, 3)
    beta = 0.9 * 4 / float(diameter(keys).square())
    certificate = attention_certificate(keys, beta=beta, tau=tau)
    F = attention_map(keys, keys, u, beta, tau)
    starts = 10 * drawn(2, 30, 3)
    found = monotone_equilibrium(F, starts, certificate, prox=prox, method=method, tolerance=1e-13)
    assert bool(found.converged.all())
    close(found.state, found.state[:1].expand(30, 3), 100.0)
    close(PROXES[prox](F(found.state), torch.ones(())), found.state, 100.0)


@pytest.mark.parametrize("method", METHODS)
def test_descent_has_one_fixed_point_that_iteration_does_not_reach(method):
    """x = -tau a tanh(beta a x): plain steps cycle, splitting ends at 0."""
    keys, start = torch.tensor([[1.0], [-1.0]], dtype=F64), torch.tensor([[0.5], [-3.0]], dtype=F64)
    F = attention_map(keys, keys, torch.zeros(1, dtype=F64), 2.0, -3.0)
    plain = equilibrium(F, start, method="iterate", throw=False)
    assert not bool(plain.converged.any())
    found = monotone_equilibrium(F, start, attention_certificate(keys, beta=2.0, tau=-3.0), method=method)
    close(found.state, torch.zeros_like(start), tolerance=1e-9)


def monotone_network(seed, d=5, m=0.3):
    """The parametrisation of [winston20]: W = (1 - m) I - A^T A + B - B^T."""
    A, B = drawn(seed, d, d), drawn(seed + 1, d, d)
    W = (1 - m) * torch.eye(d, dtype=F64) - A.mT @ A + B - B.mT
    L = torch.linalg.matrix_norm(torch.eye(d, dtype=F64) - W, 2)
    return W, Certificate(torch.tensor(m, dtype=F64), L)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_a_linear_network_is_solved_as_by_enumeration(method, seed):
    """z = relu(W z + b): of the 2^d active sets exactly one solves it, and it is the one that is found."""
    W, certificate = monotone_network(seed)
    b = drawn(seed + 2, 5)
    solutions = []
    for active in itertools.product((0.0, 1.0), repeat=5):
        D = torch.diag(torch.tensor(active, dtype=F64))
        z = torch.linalg.solve(torch.eye(5, dtype=F64) - D @ W, D @ b)
        if torch.allclose(torch.relu(z @ W.mT + b), z, atol=1e-10):
            solutions.append(z)
    assert len(solutions) == 1
    found = monotone_equilibrium(
        lambda z: z @ W.mT + b, drawn(seed + 3, 4, 5), certificate, prox="relu", method=method, tolerance=1e-13,
        max_iterations=20_000,
    )  # fmt: skip
    close(found.state, solutions[0].expand(4, 5), 100.0)


def _root(c, y):
    return brentq(lambda t: (1 - c) * math.tanh(t) + c * t - y, -400, 400, xtol=1e-14, rtol=1e-14)


def test_the_prox_of_tanh_solves_its_equation():
    """x + c (atanh x - x) = y; for c = 1 it is tanh."""
    y = torch.linspace(-9, 9, 181, dtype=F64).unsqueeze(-1)
    for c in (0.05, 0.5, 1.0, 3.0):
        roots = [_root(c, v) for v in y[:, 0].tolist()]
        expected = torch.tensor(roots, dtype=F64).tanh().unsqueeze(-1)
        close(PROXES["tanh"](y, torch.tensor(c, dtype=F64)), expected, 100.0)
    exact = PROXES["tanh"](y, torch.tensor(0.4, dtype=F64))
    inside = exact.abs() < 0.999
    close((exact + 0.4 * (exact.atanh() - exact))[inside], y[inside], 100.0)


@pytest.mark.parametrize("prox", PROXES)
def test_a_prox_is_firmly_nonexpansive(prox):
    """What every splitting needs: |Px - Py|² <= <Px - Py, x - y>."""
    x, y = 3 * drawn(1, 500, 4), 3 * drawn(2, 500, 4)
    for c in (0.3, 1.0, 2.0):
        P = [PROXES[prox](t, torch.tensor(c, dtype=F64)) for t in (x, y)]
        difference = P[0] - P[1]
        assert bool((difference.square().sum(-1) <= (difference * (x - y)).sum(-1) + 1e-12).all())


@pytest.mark.parametrize(("prox", "method"), [("none", "forward_backward"), ("tanh", "peaceman_rachford")])
def test_gradients_are_those_of_the_fixed_point(method, prox):
    keys, u = drawn(0, 6, 3).requires_grad_(), drawn(1, 4, 3).requires_grad_()
    certificate = attention_certificate(keys.detach(), beta=0.7, tau=-2.0)

    def function(keys, u):
        F = attention_map(keys, keys, u, 0.7, -2.0)
        start = torch.zeros(4, 3, dtype=F64)
        return monotone_equilibrium(F, start, certificate, prox=prox, method=method, tolerance=1e-14, throw=False).state

    assert torch.autograd.gradcheck(function, (keys, u), fast_mode=True, check_undefined_grad=False)


def test_a_certificate_may_have_a_batch():
    keys, u = drawn(0, 3, 6, 2) * torch.tensor([0.2, 1.0, 3.0], dtype=F64)[:, None, None], drawn(1, 3, 5, 2)
    certificate = attention_certificate(keys, tau=-1.0)
    assert certificate.unique.shape == (3,)
    F = attention_map(keys, keys, u, 1.0, -1.0)
    found = monotone_equilibrium(F, torch.zeros_like(u), certificate)
    close(F(found.state), found.state, tolerance=1e-9)


# Layers --------------------------------------------------------------------------------------------------------------


def built(**options):
    torch.manual_seed(0)
    return MonotoneAttention(6, 2, **{"dtype": F64, "tolerance": 1e-13, "max_iterations": 20_000, **options})


@pytest.mark.parametrize("size", [1.0, 5.0])
@pytest.mark.parametrize("margin", [0.1, 0.5, 1.0])
def test_a_monotone_layer_is_monotone_for_all_weights(size, margin):
    """The Jacobian by autograd at points far and near; also with weights five times as large."""
    layer, s = built(margin=margin), drawn(1, 2, 4, 6)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(size)
    F, certificate = layer.step(s)
    assert bool((certificate.monotonicity >= margin - 1e-12).all())
    for x in (drawn(2, 2, 4, 6), 10 * drawn(3, 2, 4, 6), 0 * s):
        J = torch.func.jacrev(lambda y: F(y).sum(1))(x)  # tokens are independent: rows of one token each
        A = torch.eye(6, dtype=F64) - torch.stack([J[b, :, b, m] for b in range(2) for m in range(4)])
        smallest = torch.linalg.eigvalsh((A + A.mT) / 2).amin(-1).reshape(2, 4)
        assert bool((smallest >= certificate.monotonicity.unsqueeze(-1) - 1e-10).all())
        assert bool((torch.linalg.matrix_norm(A, 2).reshape(2, 4) <= certificate.lipschitz.unsqueeze(-1) + 1e-10).all())


@pytest.mark.parametrize(("prox", "method"), [("none", "peaceman_rachford"), ("ball", "forward_backward")])
def test_a_layer_ends_at_its_fixed_point_and_has_its_gradient(prox, method):
    layer, s, weight = built(prox=prox, method=method), drawn(1, 2, 4, 6).requires_grad_(), drawn(2, 2, 4, 6)
    F, certificate = layer.step(s)
    x = layer(s)
    close(PROXES[prox](F(x), torch.ones(())), x, 100.0)
    wanted = [s, *layer.parameters()]
    actual = torch.autograd.grad((x * weight).sum(), wanted)
    c = certificate.step_size.min()
    y = x.detach()
    for _ in range(600):
        y = PROXES[prox](y - c * (y - F(y)), c)
    expected = torch.autograd.grad((y * weight).sum(), wanted)
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 10.0, tolerance=1e-8)


@pytest.mark.parametrize("masked", ["padding", "causal", "context"])
def test_hidden_keys_do_not_count(masked):
    layer, s = built(), drawn(1, 2, 5, 6)
    context = drawn(2, 2, 7, 6) if masked == "context" else s
    hidden = torch.zeros(2, 1, 1, context.shape[1], dtype=torch.bool)
    options = {}
    if masked == "causal":
        hidden, options = torch.ones(5, 5, dtype=torch.bool).triu(1), {"is_causal": True}
    if masked == "padding":
        hidden[0, ..., -2:] = True
        options = {"key_padding_mask": hidden[:, 0, 0]}
    x = layer(s, context, **options)
    q, k, v = (
        p(t).reshape(2, -1, 2, 3).transpose(1, 2)
        for p, t in ((layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context))
    )
    att = (q @ k.mT / 3**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    into = torch.einsum("hed,bhne->bhnd", layer.q_proj.weight.reshape(2, 3, 6), k)
    out = torch.einsum("dhe,bhne->bhnd", layer.out_proj.weight.reshape(6, 2, 3), v)
    seen = ~hidden.expand(2, 1, 5, -1)
    pairs = seen.unsqueeze(-1) & seen.unsqueeze(-2)  # of keys that a query sees
    across = [
        (t.unsqueeze(-2) - t.unsqueeze(-3)).norm(dim=-1).unsqueeze(2).masked_fill(~pairs, 0.0).amax((-2, -1))
        for t in (into, out)
    ]
    bound = (across[0] * across[1]).sum(1) / (4 * 3**0.5)
    g = (0.8 / bound.clamp(min=0.8)).unsqueeze(-1)
    A, B = layer.contracting, layer.turning
    M = -A.mT @ A + B - B.mT
    step = layer.in_proj(s) + x @ M.mT + g * layer.out_proj(att.transpose(1, 2).reshape(2, -1, 6))
    close(step, x, 100.0)


@pytest.mark.parametrize("value", [100.0, math.nan])
def test_padded_keys_change_nothing(value):
    layer, s, context = built(), drawn(1, 2, 5, 6), drawn(2, 2, 7, 6)
    padded = torch.zeros(2, 7, dtype=torch.bool)
    padded[0, [0, 3]] = True
    padded[1] = True
    changed = context.masked_fill(padded.unsqueeze(-1), value)
    x = layer(s, context, key_padding_mask=padded)
    close(layer(s, changed, key_padding_mask=padded), x, 100.0)
    close(x[:1], layer(s[:1], context[:1, ~padded[0]]), 100.0)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("m", "n"), [(5, 5), (3, 5), (5, 3)])
def test_the_future_does_not_change_the_past(m, n, padding):
    """Queries are the last m of n positions; the last key is changed, which only the last query sees."""
    layer, s, context = built(), drawn(1, 2, m, 6), drawn(2, 2, n, 6)
    options = {"is_causal": True}
    if padding:
        options["key_padding_mask"] = torch.zeros(2, n, dtype=torch.bool)
        options["key_padding_mask"][0, 0] = True
    later = context.clone()
    later[:, -1] *= 50
    x, y = (layer(s, c, **options) for c in (context, later))
    close(y[:, :-1], x[:, :-1], 100.0)
    assert bool(((y[:, -1] - x[:, -1]).abs().amax(-1) > 1e-3).all())
    assert layer.step(s, context, **options)[1].monotonicity.shape == (2, m)


def test_the_diameters_of_prefixes_are_those_of_the_first_points(monkeypatch):
    monkeypatch.setattr("gradlogz.dynamics.monotone.PAIRS", 300)
    points = drawn(0, 3, 2, 17, 4).requires_grad_()
    expected = torch.stack([diameter(points[..., : i + 1, :]) for i in range(17)], -1)
    close(prefix_diameters(points), expected, 10.0)
    found, wanted = (
        torch.autograd.grad(t.sin().sum(), points, retain_graph=True)[0] for t in (prefix_diameters(points), expected)
    )
    close(found, wanted, 10.0)
    assert prefix_diameters(points[..., :0, :]).shape == (3, 2, 0)
    close(diameter(points[..., :0, :]), torch.zeros(3, 2, dtype=F64))


def test_the_certificate_of_an_equilibrium_layer_is_that_of_its_map():
    """Contraction shrinkage: x = u / tau + att(x); small weights are certified, and all starts agree."""
    torch.manual_seed(0)
    layer = EquilibriumAttention(6, 2, tau=0.7, contraction="shrinkage", dtype=F64, tolerance=1e-13)
    s = drawn(1, 2, 4, 6)
    loose = layer.certificate(s)
    with torch.no_grad():
        for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            p.weight.mul_(0.5)
    certificate = layer.certificate(s)
    close(1 - certificate.monotonicity, (1 - loose.monotonicity) / 16, 10.0)
    assert bool(certificate.unique.all())
    step = layer.step(s)
    F = lambda x: ((1 + layer.tau) * step(x) - x) / layer.tau  # noqa: E731
    for x in (drawn(2, 2, 4, 6), 5 * drawn(3, 2, 4, 6)):
        J = torch.func.jacrev(lambda y: F(y).sum(1))(x)
        norms = torch.stack([torch.linalg.matrix_norm(J[b, :, b, m], 2) for b in range(2) for m in range(4)])
        assert bool((norms.reshape(2, 4) <= (1 - certificate.monotonicity).unsqueeze(-1) + 1e-12).all())
    found = monotone_equilibrium(F, 10 * drawn(4, 2, 4, 6), certificate, tolerance=1e-13)
    close(found.state, layer(s), 100.0)


def test_a_layer_trains_and_copies():
    layer, s = built(tolerance=None), drawn(1, 2, 4, 6)
    assert torch.equal(copy.deepcopy(layer)(s), layer(s))
    assert repr(layer).startswith("MonotoneAttention(\n  6, num_heads=2, margin=0.2, prox='none'")
    half = copy.deepcopy(layer).bfloat16()
    assert half(s.bfloat16()).dtype == torch.bfloat16
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=0.02), []
    for _ in range(30):
        loss = (layer(s) - s.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# Any contraction -----------------------------------------------------------------------------------------------------

CONTRACTIONS = {
    "tanh": (torch.tanh, torch.tanh, False),
    "module": (nn.LayerNorm(6, dtype=F64), None, False),
    "tuple": (("layer_norm", torch.tanh), lambda y: torch.tanh(nn.functional.layer_norm(y, (6,), eps=0.0)), False),
    "batch_norm": (
        "batch_norm", lambda y: (y - y.mean(1, keepdim=True)) / y.std(1, correction=0, keepdim=True), True
    ),
    "center": (
        ("center", "rms_norm"),
        lambda y: 6**0.5 * (z := y - y.mean(1, keepdim=True)) / z.norm(dim=-1, keepdim=True), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_any_contraction_may_be_in_an_equilibrium_layer(name):
    contraction, by_definition, together = CONTRACTIONS[name]
    torch.manual_seed(0)
    options = {"tau": 0.3, "dtype": F64, "tolerance": 1e-12, "max_iterations": 3000}
    layer, s = EquilibriumAttention(6, 2, contraction=contraction, **options), drawn(1, 3, 9, 6).requires_grad_()
    if name == "module":
        with torch.no_grad():
            layer.contraction.weight.copy_(1 + 0.1 * drawn(2, 6))
            layer.contraction.bias.copy_(drawn(3, 6))
        by_definition = layer.contraction
        assert "contraction.weight" in dict(layer.named_parameters())
    found = layer.settle(s)
    assert found.converged.shape == ((3,) if together else (3, 9))
    x = found.state
    q, k, v = (
        p(t).reshape(3, 9, 2, 3).transpose(1, 2) for p, t in ((layer.q_proj, x), (layer.k_proj, s), (layer.v_proj, s))
    )
    att = layer.out_proj(((q @ k.mT / 3**0.5).softmax(-1) @ v).transpose(1, 2).reshape(3, 9, 6))
    close(by_definition(x + layer.in_proj(s) + 0.3 * att), x, tolerance=1e-10)
    gradients = torch.autograd.grad(x.sin().sum(), [s, *layer.parameters()])
    assert all(bool(g.isfinite().all()) for g in gradients)


def test_modules_in_a_tuple_are_learned():
    layer = EquilibriumAttention(6, 2, contraction=("center", nn.LayerNorm(6)))
    assert "contractions.0.weight" in dict(layer.named_parameters())
