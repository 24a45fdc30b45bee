"""Every layer trains, is saved and loaded, copied, moved, put under autocast, and says what it is."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from support.attention_layers import EMBED_DIM, LAYERS, NAMES


def tokens(dtype=torch.float32):
    return torch.randn(3, 6, EMBED_DIM, dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name):
    """Tokens are to tell the mean of all tokens before them, and of themselves: what attention is for."""
    build, call = LAYERS[name]
    torch.manual_seed(0)
    layer, x = build(), torch.randn(16, 6, EMBED_DIM)
    target = x.cumsum(1) / torch.arange(1, 7).unsqueeze(-1)
    head = nn.Linear(EMBED_DIM, EMBED_DIM)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    losses = []
    for _ in range(60):
        loss = (head(call(layer, x)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0], losses[::10]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    build, call = LAYERS[name]
    layer = build(dtype=torch.float64)
    call(layer, tokens(torch.float64)).sin().sum().backward()
    missing = [n for n, p in layer.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_right(name):
    build, call = LAYERS[name]
    layer = build(dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)
    x = tokens(torch.float64)[:1, :3].requires_grad_()

    def function(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_Called(layer, call), {f"layer.{n}": p for n, p in given.items()}, (x,))

    assert torch.autograd.gradcheck(function, (x, *values), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_makes_the_round_trip(name):
    build, call = LAYERS[name]
    layer, other, x = build(), build(), tokens()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(call(layer, x), call(other, x))


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_copied_and_pickled(name):
    build, call = LAYERS[name]
    layer, x = build(), tokens()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(call(layer, x), call(twin, x))
        assert all(a is not b for a, b in zip(layer.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_device_and_dtype_are_those_asked_for(name):
    build, call = LAYERS[name]
    assert {p.dtype for p in build(dtype=torch.float64).parameters()} == {torch.float64}
    assert {p.device.type for p in build(device="meta").parameters()} == {"meta"}
    layer, x = build(), tokens()
    exact = call(copy.deepcopy(layer).double(), x.double())
    torch.testing.assert_close(call(layer, x).double(), exact, rtol=0, atol=1e-4)
    if name != "moment, full":  # measures have no meta tensors
        assert call(build(device="meta"), x.to("meta")).shape == x.shape


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_nearly_the_same(name):
    build, call = LAYERS[name]
    layer, x = build(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = call(layer, x)
    torch.testing.assert_close(actual.float(), call(layer, x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_do_not_reach_earlier_ones(name):
    """All calls of the registry are causal."""
    build, call = LAYERS[name]
    layer, x = build(dtype=torch.float64), tokens(torch.float64)
    y = torch.cat((x[:, :4], tokens(torch.float64)[:, 4:]), 1)
    torch.testing.assert_close(call(layer, x)[:, :4], call(layer, y)[:, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(call(layer, x)[:, 4:], call(layer, y)[:, 4:])


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    layer = LAYERS[name].build()
    assert repr(layer).startswith(f"{type(layer).__name__}(\n  {EMBED_DIM}, num_heads=2")


class _Called(nn.Module):
    def __init__(self, layer, call):
        super().__init__()
        self.layer, self._call = layer, call

    def forward(self, x):
        return self._call(self.layer, x)
