"""W^T f(W x + b): the potentials are integrals of the activations, and every step lowers the energy.   [krotov16]

Oracles: scipy's quadrature for the potentials, autograd for the gradient, enumeration of hidden units.
"""

import itertools
import math

import pytest
import torch
from scipy.integrate import quad

from gradlogz.attention import linear_attend
from gradlogz.dynamics import HopfieldFeedForward, hopfield_energy
from gradlogz.dynamics.feed_forward import POTENTIALS
from support.scales import close

F64 = torch.float64
ELEMENTWISE = [name for name in POTENTIALS if name != "softmax"]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def built(activation, **options):
    torch.manual_seed(0)
    layer = HopfieldFeedForward(5, 12, activation=activation, dtype=F64, **options)
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias.copy_(drawn(1, 12))
    return layer


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_potential_is_the_integral_of_its_activation(name):
    f, F = POTENTIALS[name][:2]
    start = torch.tensor([-6.0], dtype=F64)
    for u in (-3.0, -0.7, 0.0, 0.4, 2.5):
        integral, _ = quad(lambda t: float(f(torch.tensor(t, dtype=F64))), -6.0, u, points=[0.0], epsabs=1e-13)
        found = F(torch.tensor([u], dtype=F64)) - F(start)
        close(found, torch.tensor(integral, dtype=F64), 100.0)


@pytest.mark.parametrize("name", POTENTIALS)
def test_slopes_lie_between_their_bounds(name):
    """On a fine grid; for softmax the eigenvalues of the Jacobian."""
    kind = POTENTIALS[name]
    if name == "softmax":
        u = 3 * drawn(0, 200, 4)
        eigenvalues = torch.linalg.eigvalsh(torch.func.vmap(torch.func.jacrev(kind.activation))(u))
        assert float(eigenvalues.min()) > -1e-12
        assert float(eigenvalues.max()) <= 0.5
        return
    u = torch.linspace(-40, 40, 400_001, dtype=F64)
    slope = torch.func.grad(lambda t: kind.activation(t).sum())(u)
    assert kind.smallest_slope - 1e-12 <= float(slope.min()) <= kind.smallest_slope + 1e-6
    assert float(slope.max()) <= kind.largest_slope + 1e-12
    if math.isfinite(kind.largest_slope):
        assert float(slope.max()) >= kind.largest_slope - 1e-6


@pytest.mark.parametrize("name", POTENTIALS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_is_the_gradient_of_the_potential(name, bias):
    layer, x = built(name, bias=bias), drawn(2, 7, 5)
    close(layer(x), torch.func.grad(lambda y: layer.potential(y).sum())(x), 100.0)
    close(x - layer(x), torch.func.grad(lambda y: layer.energy(y).sum())(x), 100.0)
    u = x @ layer.weight.mT + (0.0 if layer.bias is None else layer.bias)
    close(layer(x), POTENTIALS[name].activation(u) @ layer.weight, 100.0)


@pytest.mark.parametrize("name", POTENTIALS)
@pytest.mark.parametrize("damping", [0.05, 0.5, 1.0])
def test_a_step_lowers_the_energy_by_the_bound(name, damping):
    """E(x) - E(x') >= s (1 - s (1 + c |W|²) / 2) |x - y|², also where the bound is negative."""
    layer, x = built(name), 0.7 * drawn(3, 200, 5)
    before, after = layer.energy(x), layer.energy(layer.step(x, damping=damping))
    bound = layer.descent(x, damping=damping)
    size = 1 + before.abs() + after.abs()
    assert bool((before - after >= bound - 1e-12 * size).all())
    if name != "gelu":
        assert bool((bound > 0).all())


def test_a_gelu_step_may_raise_the_energy():
    """The activation is not monotone: with large weights a full step goes uphill, as the bound allows."""
    layer = HopfieldFeedForward(1, 1, activation="gelu", bias=False, dtype=F64)
    with torch.no_grad():
        layer.weight.fill_(6.0)
    x = torch.linspace(-0.5, -0.05, 100, dtype=F64).unsqueeze(-1)
    rise = (layer.energy(layer.step(x)) - layer.energy(x)).detach()
    assert float(rise.max()) > 1e-3
    assert bool((rise <= -layer.descent(x) + 1e-12).all())
    small = layer.energy(layer.step(x, damping=0.1)) - layer.energy(x)
    assert bool((small <= 0).all())


def test_softmax_is_a_modern_hopfield_network():
    layer, x = built("softmax", bias=False), drawn(4, 6, 5)
    close(layer(x), (x @ layer.weight.mT).softmax(-1) @ layer.weight, 10.0)
    shift = hopfield_energy(x, layer.weight) - layer.energy(x)
    close(shift, shift[:1].expand(6), 10.0)


def test_identity_is_linear_attention_to_the_rows():
    layer, x = built("identity", bias=False), drawn(5, 6, 5)
    rows = layer.weight.detach()
    found = linear_attend(x, rows, rows, feature_map="identity", scale=1.0)
    close(layer(x), found.output, 100.0)
    close(layer.potential(x), found.log_normalizer, 100.0)


@pytest.mark.parametrize(("name", "values"), [("sigmoid", (0.0, 1.0)), ("tanh", (-1.0, 1.0))])
def test_hidden_units_are_summed_out(name, values):
    """The potential is the log of a sum over all hidden states of exp<h, W x + b>; with uniform spins for tanh."""
    torch.manual_seed(0)
    layer, x = HopfieldFeedForward(3, 6, activation=name, dtype=F64), drawn(6, 5, 3)
    hidden = torch.tensor(list(itertools.product(values, repeat=6)), dtype=F64)
    logits = (x @ layer.weight.mT + layer.bias) @ hidden.mT
    free = 0.0 if name == "sigmoid" else 6 * math.log(2)
    close(layer.potential(x), logits.logsumexp(-1) - free, 100.0)
    close(layer(x), logits.softmax(-1) @ hidden @ layer.weight, 100.0)


def test_the_lipschitz_constant_bounds_differences():
    for name in ("relu", "tanh", "sigmoid", "gelu", "softmax"):
        layer, x, y = built(name), drawn(7, 300, 5), drawn(8, 300, 5)
        ratio = (layer(x) - layer(y)).norm(dim=-1) / (x - y).norm(dim=-1)
        assert bool((ratio <= layer.lipschitz() + 1e-12).all()), name


@pytest.mark.parametrize("name", POTENTIALS)
def test_gradients_are_right(name):
    layer, x = built(name), drawn(9, 2, 5).requires_grad_()
    parameters = dict(layer.named_parameters())

    def function(x, *values):
        given = dict(zip(parameters, values, strict=True))
        call = torch.func.functional_call
        return call(layer, given, (x,)), x.sum() + call(
            _Energy(layer), {f"layer.{n}": v for n, v in given.items()}, (x,)
        )

    assert torch.autograd.gradcheck(function, (x, *parameters.values()), fast_mode=True)


class _Energy(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.energy(x)
