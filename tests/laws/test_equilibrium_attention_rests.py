"""The layer whose output is where attention comes to rest: place, gradient, memory, masks, training.   [theory 5.8]"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from gradlogz.dynamics import EquilibriumAttention, jacobian_penalty
from support.scales import close

F64 = torch.float64
CONTRACTIONS = ["layer_norm", "rms_norm", "sphere", "shrinkage"]
KINDS = [{"contraction": name} for name in CONTRACTIONS] + [
    {"moving": True},
    {"method": "newton"},
    {"method": "newton", "moving": True},
    {"tau": 0.3, "bias": False},
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def built(**options):
    torch.manual_seed(0)
    return EquilibriumAttention(6, 2, **{"dtype": F64, "tolerance": 1e-13, "max_iterations": 500, **options})


def by_hand(layer, s, context=None, hidden=None):
    """One step by its definition, with torch's softmax and norms."""
    weights = {name: (p.weight, p.bias if p.bias is not None else 0.0) for name, p in layer.named_children()}
    c = s if context is None else context

    def through(name, x):
        W, b = weights[name]
        return x @ W.mT + b

    def heads(x):
        return x.unflatten(-1, (2, 3)).transpose(-3, -2)

    def step(x):
        keys = x if layer.moving else c
        q, k, v = heads(through("q_proj", x)), heads(through("k_proj", keys)), heads(through("v_proj", keys))
        logits = q @ k.mT / 3**0.5
        logits = logits if hidden is None else logits.masked_fill(hidden, -torch.inf)
        att = through("out_proj", (logits.softmax(-1) @ v).transpose(-3, -2).flatten(-2))
        y = x + through("in_proj", s) + layer.tau * att
        if layer.contraction == "layer_norm":
            return nn.functional.layer_norm(y, (6,), eps=0.0)
        if layer.contraction == "shrinkage":
            return y / (1 + layer.tau)
        return y / y.norm(dim=-1, keepdim=True) * (6**0.5 if layer.contraction == "rms_norm" else 1.0)

    return step


@each_kind
def test_the_output_rests_under_a_step_by_definition(kind):
    layer, s = built(**kind), drawn(1, 3, 5, 6)
    found = layer.settle(s)
    assert bool(found.converged.all())
    assert found.converged.shape == ((3,) if layer.moving else (3, 5))
    close(by_hand(layer, s)(found.state), found.state, 10.0)
    close(layer.step(s)(found.state), found.state, 10.0)


@each_kind
def test_gradients_are_those_of_the_unrolled_steps(kind):
    layer, s, weight = built(**kind), drawn(1, 2, 4, 6).requires_grad_(), drawn(2, 2, 4, 6)
    wanted = [s, *layer.parameters()]
    actual = torch.autograd.grad((layer(s) * weight).sum(), wanted)
    x, step = drawn(3, 2, 4, 6), by_hand(layer, s)
    with torch.no_grad():
        for _ in range(300):
            x = step(x)
    for _ in range(400):
        x = step(x)
    expected = torch.autograd.grad((x * weight).sum(), wanted)
    for a, e in zip(actual, expected, strict=True):
        close(a, e, 10.0, tolerance=1e-8)


@pytest.mark.parametrize("masked", ["padding", "causal", "context"])
def test_keys_that_are_hidden_do_not_count(masked):
    layer, s = built(kdim=4) if masked == "context" else built(), drawn(4, 2, 5, 6)
    if masked == "causal":
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        close(by_hand(layer, s, hidden=hidden)(x := layer(s, is_causal=True)), x, 10.0)
        return
    context = drawn(5, 2, 7, 4) if masked == "context" else s
    padding = torch.zeros(context.shape[:-1], dtype=torch.bool)
    padding[0, -2:] = True
    x = layer(s, context, key_padding_mask=padding)
    close(by_hand(layer, s, context, hidden=padding[:, None, None])(x), x, 10.0)
    other = context.masked_fill(padding.unsqueeze(-1), 100.0)
    close(layer(s, other, key_padding_mask=padding), x)


@pytest.mark.parametrize("moving", [False, True])
def test_a_sample_does_not_depend_on_those_beside_it(moving):
    layer, s = built(moving=moving, tolerance=None), torch.stack((drawn(6, 5, 6), 3 * drawn(7, 5, 6)))
    together = layer.settle(s)
    for i in range(2):
        alone = layer.settle(s[i : i + 1])
        close(together.state[i], alone.state[0], 10.0)
        assert torch.equal(together.steps[i], alone.steps[0])


def saved_bytes(layer, s):
    total = 0

    def pack(t):
        nonlocal total
        total += t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = layer.settle(s)
    return total, int(found.steps.max())


def test_memory_does_not_grow_with_the_steps():
    s = drawn(8, 2, 16, 6).requires_grad_()
    (few, short), (many, long) = (saved_bytes(built(tolerance=t, method="iterate"), s) for t in (1e-2, 1e-12))
    assert long > 4 * short
    assert many == few > 0


def test_no_matrix_of_pairs_is_made():
    layer = EquilibriumAttention(32, 2, tau=0.5, tolerance=1e-3)
    s = torch.randn(1, 4096, 32, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.autograd.grad(layer(s).sum(), s)
    largest = max(event.cpu_memory_usage for event in profile.events() if event.name.startswith("aten::empty"))
    assert 4 * s.numel() <= largest < 4 * 4096**2  # bytes: one head's weights


def test_the_spectral_radius_is_that_of_the_jacobian():
    layer, s = built(), drawn(9, 1, 3, 6)
    x, step = layer(s).detach(), by_hand(layer, s)
    found = layer.spectral_radius(s, steps=400)
    for i in range(3):
        J = torch.func.jacrev(lambda row, i=i: step(torch.cat((x[0, :i], row[None], x[0, i + 1 :]))[None])[0, i])(
            x[0, i]
        )
        close(found[0, i], torch.linalg.eigvals(J).abs().max(), tolerance=1e-2)
    assert bool((found < 1).all())


def test_where_it_does_not_come_to_rest_it_says_so():
    layer, s = built(max_iterations=2), drawn(10, 2, 4, 6)
    with pytest.raises(RuntimeError, match="8 of 8 tokens"):
        layer(s)
    layer.throw = False
    found = layer.settle(s)
    assert not bool(found.converged.any())
    assert bool((found.residual > 0).all())


@pytest.mark.parametrize("moving", [False, True])
def test_it_learns(moving):
    """Tokens are to tell the mean of all tokens, with the penalty that keeps the map quick to rest."""
    torch.manual_seed(0)
    layer = EquilibriumAttention(8, 2, moving=moving, tolerance=1e-4)
    head, x = nn.Linear(8, 8), torch.randn(16, 6, 8)
    target = x.mean(1, keepdim=True).expand_as(x)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    losses, radii = [], []
    for step in range(50):
        found = layer.settle(x)
        loss = (head(found.state) - target).square().mean()
        penalty = jacobian_penalty(layer.step(x), found.state, tokens_interact=moving).mean()
        optimizer.zero_grad()
        (loss + 0.01 * penalty).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step in (0, 49):
            radii.append(float(layer.spectral_radius(x).max()))
    assert losses[-1] < 0.5 * losses[0], losses[::10]
    assert radii[-1] < 1
    layer.eval()
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_a_state_dict_a_copy_and_a_pickle_give_the_same():
    layer, s = EquilibriumAttention(8, 2, kdim=4), torch.randn(2, 5, 8)
    context = torch.randn(2, 3, 4)
    other = EquilibriumAttention(8, 2, kdim=4)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(layer(s, context), twin(s, context))
    assert "8, num_heads=2, kdim=4, tau=1.0, contraction='layer_norm', method='anderson'" in repr(layer)


def test_half_precision_and_autocast_rest_in_single():
    layer, s = EquilibriumAttention(8, 2), torch.randn(2, 5, 8)
    exact = layer(s)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(s)
        found.sum().backward()
    torch.testing.assert_close(found, exact)
    half = copy.deepcopy(layer).bfloat16()(s.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0, atol=0.1)
