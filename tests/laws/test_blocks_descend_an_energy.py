"""Attention and feed-forward layer with one energy: the gradient by autograd, descent, and where descent fails."""

import copy

import pytest
import torch

from gradlogz.dynamics import EnergyBlock, hopfield_energy
from support.scales import close

F64 = torch.float64


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def built(seed=0, size=1.0, **options):
    torch.manual_seed(seed)
    block = EnergyBlock(6, 2, 20, **{"dtype": F64, **options})
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(size)
    return block


def by_hand(block, x, context):
    """|x|²/2 - A(x) - F(x) of every token, with torch's logsumexp."""
    q, k = (
        p(t).reshape(*t.shape[:-1], 2, 3).transpose(-3, -2) for p, t in ((block.q_proj, x), (block.k_proj, context))
    )
    A = (block.beta * q @ k.mT).logsumexp(-1).sum(-2) / block.beta
    ff = block.feed_forward
    return x.square().sum(-1) / 2 - A - torch.relu(x @ ff.weight.mT + ff.bias).square().sum(-1) / 2


@pytest.mark.parametrize("beta", [None, 3.0])
def test_a_step_is_the_gradient_of_the_energy(beta):
    """Of fixed keys for each token; of moving keys, which have a second term, for all tokens together."""
    block, x, c = built(beta=beta), drawn(1, 2, 5, 6), drawn(2, 2, 7, 6)
    close(block.energy(x, c), by_hand(block, x, c), 100.0)
    close(block.energy(x), by_hand(block, x, x).sum(-1), 100.0)
    gradient = torch.func.grad(lambda y: by_hand(block, y, c).sum())(x)
    close((x - block.step(x, c)) / block.damping, gradient, 100.0)
    gradient = torch.func.grad(lambda y: by_hand(block, y, y).sum())(x)
    close((x - block.step(x)) / block.damping, gradient, 100.0)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "softmax"])
@pytest.mark.parametrize("damping", [0.2, 1.0])
def test_parallel_sublayers_descend(activation, damping):
    """With a fixed context, by at least the bound; for many tokens of several sizes."""
    block = built(activation=activation, damping=damping, steps=4)
    x, c = drawn(3, 3, 50, 6) * torch.tensor([0.1, 1.0, 4.0], dtype=F64)[:, None, None], drawn(4, 3, 7, 6)
    for _ in range(4):
        y = block.step(x, c)
        fall = block.energy(x, c) - block.energy(y, c)
        size = 1 + block.energy(x, c).abs()
        assert bool((fall >= block.descent(x, c) - 1e-12 * size).all())
        x = y
    assert torch.equal(block(x, c), block.step(block.step(block.step(block.step(x, c), c), c), c))


def test_each_sublayer_descends_its_own_energy():
    block, x, c = built(damping=0.7), drawn(5, 4, 30, 6), drawn(6, 4, 7, 6)

    def own(y):
        return y.square().sum(-1) / 2 - block.attention_potential(y, c)

    assert bool((own(block.attention_step(x, c)) <= own(x) + 1e-12).all())
    ff = block.feed_forward
    assert bool((ff.energy(block.feed_forward_step(x)) <= ff.energy(x) + 1e-12).all())


def test_sublayers_in_sequence_descend_no_energy():
    """From the minimum of the block's energy, the sequence moves away and raises it, and the attention energy, too."""
    block, c = built(size=0.5, damping=0.5, activation="tanh").requires_grad_(False), drawn(7, 1, 7, 6)
    x = drawn(8, 1, 20, 6)
    for _ in range(500):
        x = block.step(x, c)
    assert float((block.step(x, c) - x).abs().max()) < 1e-12
    after = block.feed_forward_step(block.attention_step(x, c))
    assert bool((block.energy(after, c) > block.energy(x, c) + 1e-3).all())

    def own(y):
        return y.square().sum(-1) / 2 - block.attention_potential(y, c)

    start = block.attention_step(x, c)
    for _ in range(200):
        start = block.attention_step(start, c)
    assert bool((own(block.feed_forward_step(start)) > own(start)).any())


def test_moving_keys_need_the_second_term():
    """Small steps with both terms lower the energy of all tokens; at its minimum, attention alone raises it."""
    block, x = built(size=0.8, damping=0.05, activation="tanh").requires_grad_(False), drawn(9, 8, 5, 6)
    for _ in range(2000):
        y = block.step(x)
        assert bool((block.energy(y) <= block.energy(x) + 1e-12).all())
        x = y
    assert float((block.step(x) - x).abs().max()) < 1e-10
    assert float(x.norm(dim=-1).min()) > 0.1
    assert bool((block.energy(block.step(x, x)) > block.energy(x) + 1e-6).all())


def test_one_head_without_feed_forward_is_a_hopfield_network():
    block = EnergyBlock(4, 1, 3, beta=2.0, dtype=F64)
    with torch.no_grad():
        block.feed_forward.weight.zero_()
        for p in (block.q_proj, block.k_proj):
            p.weight.copy_(torch.eye(4))
    x, patterns = drawn(10, 5, 4), drawn(11, 8, 4)
    shift = hopfield_energy(x, patterns, beta=2.0) - block.energy(x, patterns)
    close(shift, shift[:1].expand(5), 10.0)


@pytest.mark.parametrize("fixed", [True, False])
def test_it_trains(fixed):
    block, x, c = built(steps=2), drawn(12, 2, 4, 6).requires_grad_(), drawn(13, 2, 5, 6)
    names, values = zip(*block.named_parameters(), strict=True)

    def function(x, *values):
        arguments = (x, c) if fixed else (x,)
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), arguments)

    assert torch.autograd.gradcheck(function, (x, *values), fast_mode=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("with_context", [False, True])
def test_half_precision_is_that_of_its_numbers(autocast, with_context):
    """In bfloat16, or under autocast, a block makes the step of float32 but for the 8 bits of its numbers."""
    torch.manual_seed(0)
    block, x = EnergyBlock(8, 2, 16), torch.randn(3, 5, 8)
    context = (torch.randn(3, 7, 8),) if with_context else ()
    expected = block(x, *context)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            found = block(x, *context)
    else:
        half = copy.deepcopy(block).bfloat16()
        found = half(x.bfloat16(), *(c.bfloat16() for c in context))
        assert found.dtype == torch.bfloat16
        assert bool(half.energy(x.bfloat16(), *(c.bfloat16() for c in context)).isfinite().all())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.02 * float(expected.detach().abs().max()))
