"""Feed-forward maps with W_2 = W_1ᵀ are told from their reverse and from others.   [hopfield82, krotov16]"""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import integrate

from gradlogz.probing import capture
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.feed_forward import ACTIVATIONS
from gradlogz.probing.predictions import feed_forward_hopfield as hopfield
from gradlogz.probing.predictions.feed_forward_hopfield import COSINE, GAIN, GATE, UNITS
from gradlogz.probing.statistics import merge
from support.architectures import ARCHITECTURES
from support.planted import matrices
from support.planted.sublayers import gpt2, llama
from support.planted.updates import untrained
from support.probe_models import details_of, findings_of, judged, probed, remarks_of, state_of, token_batches
from support.scales import close

BATCHES = token_batches(matrices.VOCABULARY, rows=4, length=48)


@pytest.fixture(autouse=True)
def _many_tokens(monkeypatch):
    monkeypatch.setattr(hopfield, "PART", 4)


PLANTED = {
    "Hopfield layers": (lambda: gpt2(1.0), "supported"),
    "Hopfield layers, gelu": (lambda: gpt2(1.0, activation="gelu_new"), "supported"),
    "partly aligned": (lambda: gpt2(0.3), "supported"),
    "reversed": (lambda: gpt2(-1.0), "refuted"),
    "gated": (lambda: llama(1.0), "supported"),
    "gated, reversed": (lambda: llama(-1.0), "refuted"),
    "gated, unrelated": (lambda: llama(0.0), "inconclusive"),
    "untrained GPT-2": (lambda: untrained("gpt2", 0.02), "inconclusive"),
    "untrained BERT, larger scale": (lambda: untrained("bert", 0.25), "inconclusive"),
    "attention without feed-forward maps of the form": (
        lambda: next(a for a in ARCHITECTURES if a.name == "mixtral").build(),
        "not applicable",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_models_get_the_right_verdict(name):
    build, expected = PLANTED[name]
    batches = token_batches(64, rows=3, length=24) if expected == "not applicable" else BATCHES
    assert judged(hopfield, build(), batches).verdict == expected


def test_the_host_does_not_wait_for_norms(monkeypatch):
    """Gains and biases are float64 on the CPU; a copy to a GPU that is not asynchronous would stop the host."""
    waiting, move = [], torch.Tensor.to

    def to(self, *args, **options):
        if self.ndim == 1 and self.dtype == torch.float64 and not options.get("non_blocking"):
            waiting.append(self)
        return move(self, *args, **options)

    model = llama(1.0)
    architecture = discover(model, BATCHES[0].inputs)
    assert {s.reads.gain.dtype for s in architecture.sublayers} == {torch.float64}
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert state_of(hopfield, model, BATCHES, architecture)
    assert waiting == []


def test_unrelated_maps_are_counted():
    found = judged(hopfield, llama(0.0), token_batches(matrices.VOCABULARY, rows=48, length=48))
    assert details_of(found)["unrelated"].count == 2
    assert set(remarks_of(found)) == {"unrelated"}


def test_a_hopfield_layer_descends_its_energy():
    up, down = (details_of(judged(hopfield, gpt2(s), BATCHES)) for s in (1.0, -1.0))
    assert up[GAIN].value > 0.3 > -0.3 > down[GAIN].value
    assert up[UNITS].value == pytest.approx(1.0, abs=1e-4)
    assert down[UNITS].value == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.parametrize(("kind", "scale"), [("gpt2", 0.02), ("bert", 0.25)])
@pytest.mark.parametrize("layers", [4, pytest.param(40, marks=pytest.mark.long)])
def test_layers_of_random_weights_seldom_get_a_verdict(kind, scale, layers):
    found = judged(hopfield, untrained(kind, scale, seed=2, layers=layers), BATCHES)
    allowed = 0.05 * found.judged + 3 * (0.05 * 0.95 * found.judged) ** 0.5
    assert found.judged == layers
    assert max(found.supported, found.refuted) <= allowed


def changed(model, change):
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other, torch.Generator().manual_seed(3))
    return other


def rescaled_relu(model, generator):
    """Reading vectors and biases of units times c > 0, output vectors divided by c, and units in another order."""
    for block in model.transformer.h:
        fc, proj = block.mlp.c_fc, block.mlp.c_proj
        c = torch.exp(2 * torch.randn(fc.bias.shape, generator=generator).double())
        order = torch.randperm(len(c), generator=generator)
        fc.weight.copy_((fc.weight * c)[:, order])
        fc.bias.copy_((fc.bias * c)[order])
        proj.weight.copy_((proj.weight / c[:, None])[order])


def rescaled_gates(model, generator):
    """The factor without activation function times c of any sign, output vectors divided by c."""
    for layer in model.model.layers:
        up, down = layer.mlp.up_proj, layer.mlp.down_proj
        c = torch.exp(torch.randn(len(up.weight), generator=generator).double())
        c *= 2.0 * torch.randint(0, 2, c.shape, generator=generator) - 1
        up.weight.mul_(c[:, None])
        down.weight.div_(c)


@pytest.mark.parametrize(("build", "change"), [(gpt2, rescaled_relu), (llama, rescaled_gates)])
def test_no_quantity_depends_on_the_scale_and_order_of_units(build, change):
    model = build(0.5, layers=2).double()
    rows = []
    for each in (model, changed(model, change)):
        known = probed(each, BATCHES[0])
        rows.append(hopfield.evaluate(state_of(hopfield, each, BATCHES, known.architecture), known))
    quantities = {m.quantity for m in rows[0]}
    assert quantities == {COSINE, GAIN, UNITS} | ({GATE} if build is llama else set())
    a, b = (torch.tensor([m[3:6] for m in each], dtype=torch.float64) for each in rows)
    close(a, b, tolerance=1e-9)


def norm(x, gain, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True)) * gain + bias


def along(x, step):
    """Without the mean over features and the component along the centred token."""
    n = x - x.mean(-1, keepdims=True)
    n = n / np.linalg.norm(n, axis=-1, keepdims=True)
    step = step - step.mean(-1, keepdims=True)
    return step - (step * n).sum(-1, keepdims=True) * n


def along_both(x, other, steps):
    """Without the mean over features and the components along two centred tokens, row by row."""
    rows = []
    for a, b, step in zip(x, other, steps, strict=True):
        basis = np.linalg.qr(np.stack([a - a.mean(), b - b.mean()], 1))[0]
        step = step - step.mean()
        rows.append(step - basis @ (basis.T @ step))
    return np.array(rows)


def test_what_all_tokens_receive_does_not_count():
    """A unit that is active alike for all tokens, with a long output vector."""
    values = []
    model = gpt2(0.3, layers=1).double()
    mlp = model.transformer.h[0].mlp
    with torch.no_grad():
        mlp.c_fc.weight[:, 0] *= 1e-9
        mlp.c_fc.bias[0] = 10.0
    for length in (0.0, 100.0):
        with torch.no_grad():
            mlp.c_proj.weight[0] = length * torch.linspace(-1, 1, mlp.c_proj.weight.shape[1])
        known = probed(model, BATCHES[0])
        rows = hopfield.evaluate(state_of(hopfield, model, BATCHES, known.architecture), known)
        values.append(next(m.value for m in rows if m.quantity == COSINE))
    assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_every_quantity_is_its_definition(monkeypatch):
    """A GPT-2 with gelu in numpy; the energy is integrated by adaptive quadrature."""
    monkeypatch.setattr(hopfield, "PART", 1)
    model = gpt2(0.4, activation="gelu", layers=1).double()
    batches = token_batches(matrices.VOCABULARY, rows=1, length=10, batches=2, padded=False)
    known = probed(model, batches[0])
    rows = {
        m.quantity: m.value for m in hopfield.evaluate(state_of(hopfield, model, batches, known.architecture), known)
    }
    block = model.transformer.h[0]
    gain, shift = block.ln_2.weight.detach().numpy(), block.ln_2.bias.detach().numpy()
    W1, b1 = block.mlp.c_fc.weight.detach().numpy(), block.mlp.c_fc.bias.detach().numpy()
    W2, b2 = block.mlp.c_proj.weight.detach().numpy(), block.mlp.c_proj.bias.detach().numpy()
    P = matrices.centring()
    reading, output = (gain[:, None] * W1).T @ P, W2 @ P
    d = np.linalg.norm(output, axis=1) / np.linalg.norm(reading, axis=1)

    def f(h):
        return h * (1 + math.erf(h / math.sqrt(2))) / 2

    def change(low, high):
        """Phi(N(high)) - Phi(N(low)) of one token."""
        ends = [norm(t, gain, shift) @ W1 + b1 for t in (low, high)]
        return sum(w * integrate.quad(f, a, b)[0] for w, a, b in zip(d, *ends, strict=True))

    def sphere(x, step):
        n, moved = x - x.mean(), x + step - (x + step).mean()
        return moved * np.linalg.norm(n) / np.linalg.norm(moved) + x.mean()

    cosines, own, permuted, best, units, squares = [], 0.0, 0.0, 0.0, 0.0, 0.0
    for batch in batches:
        x = capture(model, batch.inputs, architecture=known.architecture).sublayers["transformer.h.0.mlp"].stream[0]
        x = x.numpy()
        a = np.vectorize(f)(norm(x, gain, shift) @ W1 + b1)
        gradient = along(x, a @ (d[:, None] * reading))
        other = np.roll(np.arange(10), -5)
        change_of = a - a[other]
        v, g = (along_both(x, x[other], change_of @ vectors) for vectors in (W2, d[:, None] * reading))
        cosines += list((v * g).sum(-1) / np.linalg.norm(v, axis=-1) / np.linalg.norm(g, axis=-1))
        weight = ((a - a[other]) * np.linalg.norm(output, axis=1)) ** 2
        angle = (reading * output).sum(-1) / np.linalg.norm(reading, axis=1) / np.linalg.norm(output, axis=1)
        units, squares = units + (weight @ angle).sum(), squares + weight.sum()
        whole = a @ W2 + b2
        for i in range(10):
            T, T2 = along(x[i], whole[i]), along(x[i], whole[other[i]])
            T2 = T2 * np.linalg.norm(T) / np.linalg.norm(T2)
            b = gradient[i] / np.linalg.norm(gradient[i]) * np.linalg.norm(whole[i])
            odd = [change(sphere(x[i], -s), sphere(x[i], s)) for s in (T, T2, b)]
            own, permuted, best = own + odd[0], permuted + odd[1], best + odd[2]
    assert rows[COSINE] == pytest.approx(np.mean(cosines), abs=1e-6)  # the norm of the model has an eps
    assert rows[UNITS] == pytest.approx(units / squares, abs=1e-6)
    assert rows[GAIN] == pytest.approx((own - permuted) / best, abs=1e-4)  # four nodes


def test_permuted_units_are_the_null():
    """Pairs of other units: the mean over permutations is near 0, and their band contains a random pairing."""
    model = gpt2(1.0)
    with torch.no_grad():
        for block in model.transformer.h:
            order = torch.randperm(len(block.mlp.c_proj.weight), generator=torch.Generator().manual_seed(9))
            block.mlp.c_proj.weight.copy_(block.mlp.c_proj.weight[order])
    known = probed(model, BATCHES[0])
    found = findings_of(hopfield, state_of(hopfield, model, BATCHES, known.architecture), known)
    rows = [f for f in found if f.quantity == COSINE]
    assert all(f.null_low < 0 < f.null_high for f in rows)
    assert all(f.null_low - 0.05 < f.value < f.null_high + 0.05 for f in rows)


def test_shards_merge_to_one_pass():
    model = gpt2(0.5)
    one = probed(model, BATCHES[0])
    parts = [state_of(hopfield, model, part, one.architecture) for part in (BATCHES, BATCHES[5:], BATCHES[:5])]
    found = [hopfield.evaluate(state, one) for state in (parts[0], merge(parts[1], parts[2]))]
    a, b = (torch.tensor([m[3:6] for m in rows], dtype=torch.float64) for rows in found)
    close(a, b, tolerance=1e-9)


FORMS = {  # activation, gated
    "bert": ("gelu", False),
    "albert": ("gelu_tanh", False),
    "modernbert": ("gelu", True),
    "gpt2": ("gelu_tanh", False),
    "opt": ("relu", False),
    "llama": ("silu", True),
    "gemma2": ("gelu_tanh", True),
    "phi3": ("silu", True),
    "t5": ("relu", False),
    "clip": ("quick_gelu", False),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_feed_forward_map_is_recognised(name):
    """Activation and gate are those of the configuration, and the modules reproduce the update."""
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    model, inputs = architecture.build(), architecture.inputs()
    known = discover(model, inputs)
    maps = [s.name for s in known.sublayers if s.kind == "feed_forward"]
    assert set(known.feed_forward) == set(maps)
    form = known.feed_forward[maps[0]]
    assert (form.activation, form.gate is not None) == FORMS[name]
    assert form.activation in ACTIVATIONS
    passed = capture(model, inputs, architecture=known).sublayers[maps[0]]
    layer, z = passed.map, passed.input
    h = z @ layer.matrix(form.first, z.shape[-1]) + layer.read(form.first, torch.zeros_like(z))
    a = layer.activation(h)
    if form.gate is not None:
        gate = z @ layer.matrix(form.gate, z.shape[-1]) + layer.read(form.gate, torch.zeros_like(z))
        a = layer.activation(gate) * h
    update = a @ layer.output
    if passed.sublayer.closes is None:
        bias = passed.update - update
        assert float((bias - bias[:1, :1]).detach().abs().max()) < 1e-4 * float(update.detach().abs().max())
