"""One step of `layer_dynamics` is the layer of the model: attention, norms and feed-forward map.   [theory 5.3]"""

import math

import pytest
import torch
from torch import nn

from gradlogz import Ascent, evolve
from gradlogz.dynamics import LayerNorm, LayerNorms, Rotation, TrainedHeads
from gradlogz.probing import layer_dynamics
from gradlogz.probing.inside.loading import load
from support.scales import close
from support.tiny_models import tiny

F64 = torch.float64


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def stream(model, inputs, module):
    """The tokens that a block reads and those it returns, recorded by hooks of torch alone."""
    recorded = {}

    def store(block, args, kwargs, result):
        tokens = args[0] if args else kwargs["hidden_states"]
        recorded.setdefault("before", tokens.clone())
        recorded.setdefault("after", (result if isinstance(result, torch.Tensor) else result[0]).clone())

    hook = model.get_submodule(module).register_forward_hook(store, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return recorded["before"], recorded["after"]


# Kind, model type, the module of its second layer. Encoders with post-norm, decoders with a causal mask and rotary
# embeddings, grouped keys, images.
LAYERS = [
    ("masked", "bert", "bert.encoder.layer.1"),
    ("masked", "albert", "albert.encoder.albert_layer_groups.1.albert_layers.0"),
    ("masked", "distilbert", "distilbert.transformer.layer.1"),
    ("causal", "gpt2", "transformer.h.1"),
    ("causal", "opt", "model.decoder.layers.1"),
    ("causal", "stablelm", "model.layers.1"),
    ("causal", "llama", "model.layers.1"),
    ("image", "vit", "vit.layers.1"),
]


@pytest.mark.parametrize(("kind", "name", "module"), LAYERS, ids=[name for _, name, _ in LAYERS])
def test_one_step_is_the_layer(kind, name, module):
    model, inputs, _ = tiny(kind, name)
    model = in_float64(model)
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    inputs = {k: torch.ones_like(t) if k == "attention_mask" else t for k, t in inputs.items()}
    dynamics = layer_dynamics(model, inputs, 1)
    before, after = stream(model, inputs, module)
    step = dynamics.evolve(before, steps=1)
    close(step.cloud, after, float(after.abs().max()))
    assert dynamics.error < 1e-14
    assert dynamics.length == before.shape[1]
    moved = dynamics.evolve(before.flip(1), steps=1).cloud.flip(1)
    ordered = dynamics.ascent.causal or dynamics.ascent.heads.rotation is not None
    assert ordered == (float((moved - after).abs().max()) > 1e-6), "only masks and rotations depend on the order"


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
        ("minilm", "encoder.layer.3", "A sampled distribution passes through the layers of a model."),
        ("rxnmapper", "albert.encoder.albert_layer_groups.0.albert_layers.0", "CC(=O)OCC.CCO>>CC(=O)O.CCOCCN"),
        pytest.param("rxnfp", "bert.encoder.layer.3", "CC(=O)OCC.CCO>>CC(=O)O.CCOCCN", marks=pytest.mark.long),
        pytest.param("smollm2", "model.layers.3", "The rotary decoder has grouped keys.", marks=pytest.mark.long),
    ],
)
def test_one_step_is_the_layer_of_a_pretrained_model(name, module, text):
    loaded = load(name, device="cpu", dtype="float64")
    model = in_float64(loaded.model)
    inputs = {k: t for k, t in loaded.tokenizer([text], return_tensors="pt").items() if k != "token_type_ids"}
    before, after = stream(model, inputs, module)
    number = 0 if name == "rxnmapper" else 3  # its layers are one module
    step = layer_dynamics(model, inputs, number).evolve(before, steps=1)
    close(step.cloud, after, float(after.abs().max()))


def in_float64(model):
    """The model with softmax and norms that compute in float64; some of them compute in float32 whatever the input."""
    model = model.double()
    model.set_attn_implementation("sdpa")
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=F64)
            norm.weight = module.weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, norm)
    return model


def test_two_steps_of_tied_layers_are_two_layers():
    model, inputs, _ = tiny("masked", "albert")
    model = model.double()
    group = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    x = gaussian(2, 9, 32)
    with torch.no_grad():
        twice = group(group(x)[0])[0] if isinstance(group(x), tuple) else group(group(x))
    close(layer_dynamics(model, inputs, 0).evolve(x, steps=2).cloud, twice, float(twice.abs().max()))


def test_causal_rotary_heads_are_their_definition():
    """Attention of each head written out, with rotations as complex multiplication."""
    h, D, d, n, beta = 2, 6, 4, 5, 0.7
    matrices = [gaussian(h, D, d, seed=i) for i in range(3)]
    biases = [gaussian(h, d, seed=3 + i) for i in range(3)]
    output, output_bias, x = gaussian(h, d, D, seed=7), gaussian(D, seed=8), gaussian(n, D, seed=9)
    angle = torch.arange(n, dtype=F64).unsqueeze(-1) * torch.tensor([1.0, 0.1], dtype=F64)
    rotation = Rotation(torch.tensor([0, 1]), torch.tensor([2, 3]), angle.cos(), angle.sin())
    parts = [part for pair in zip(matrices, biases, strict=True) for part in pair]
    heads = TrainedHeads(*parts, output, output_bias, rotation)
    attended, record = Ascent(beta=beta, causal=True, heads=heads).attended(x, statistics=True)
    expected, log_normalizers, entropies = output_bias.expand(n, D).clone(), torch.zeros(h, n, dtype=F64), []
    for head in range(h):
        q, k, v = (x @ W[head] + b[head] for W, b in zip(matrices, biases, strict=True))
        q, k = (torch.polar(torch.ones_like(angle), angle) * torch.complex(t[:, :2], t[:, 2:]) for t in (q, k))
        for i in range(n):
            logits = beta * (q[i] * k[: i + 1].conj()).real.sum(-1)
            weights = logits.exp() / logits.exp().sum()
            expected[i] += (weights @ v[: i + 1]) @ output[head]
            log_normalizers[head, i] = logits.exp().sum().log()
            entropies.append(-(weights * weights.log()).sum())
    scale = float(expected.abs().max())
    close(attended, expected, scale)
    close(record.log_normalizer, log_normalizers, scale)
    close(record.entropy, torch.stack(entropies).reshape(h, n), 10.0)


def test_heads_without_biases_are_the_ascent_with_their_matrices():
    h, D, d = 3, 6, 2
    parts = [gaussian(h, D, d, seed=i) for i in range(3)]
    zero = torch.zeros(h, d, dtype=F64)
    heads = TrainedHeads(parts[0], zero, parts[1], zero, parts[2], zero, gaussian(h, d, D, seed=4), gaussian(D) * 0)
    x = gaussian(2, 7, D, seed=5)
    names = ["log_pair_energy", "self_weight", "entropy"]
    factored = evolve(x, Ascent(beta=0.3, heads=heads), steps=1, observe=names)
    plain = evolve(x, Ascent(beta=0.3, B=heads.B, W_v=h * heads.W_v), steps=1, observe=names)
    close(factored.cloud, plain.cloud, float(plain.cloud.abs().max()))
    for name in names:
        close(factored.observed[name], plain.observed[name], 100.0)


def test_each_norm_of_a_layer_is_used_at_its_place():
    d, x = 4, gaussian(6, 4)
    gains = [gaussian(d, seed=i) for i in range(4)]
    norms = [LayerNorm(g, gaussian(d, seed=9), 1e-3, centres=i % 2 == 0) for i, g in enumerate(gains)]
    layer = LayerNorms(*norms)
    ascent = Ascent(feed_forward=torch.sin)

    def attended(z):
        return (z @ z.mT).softmax(-1) @ z

    a, b, c, e = norms
    y = b(x + attended(x))
    close(evolve(x, ascent, contraction=layer, steps=1).cloud, e(y + y.sin()))
    y = x + attended(a(x))
    close(evolve(x, ascent, contraction=layer, placement="pre", steps=1).cloud, y + c(y).sin(), 10.0)
    y = x + b(attended(a(x)))
    close(evolve(x, ascent, contraction=layer, placement="peri", steps=1).cloud, y + c(y).sin(), 10.0)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.1])
def test_a_token_norm_is_that_of_torch(eps):
    x, gain, bias = gaussian(3, 7, 10), gaussian(10, seed=1), gaussian(10, seed=2)
    close(LayerNorm(gain, bias, eps, centres=True)(x), nn.functional.layer_norm(x, (10,), gain, bias, eps), 10.0)
    close(LayerNorm(gain, 0 * bias, eps, centres=False)(x), nn.functional.rms_norm(x, (10,), gain, eps), 10.0)


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_parameters_of_norms_are_measured_to_rounding(kind, eps):
    from gradlogz.probing.inside.norms import parameters_of

    norm = kind(24, eps=eps, dtype=F64)
    nn.init.normal_(norm.weight)
    if kind is nn.LayerNorm:
        nn.init.normal_(norm.bias, std=1e-6)  # far smaller than the gain
    gain, bias, found = parameters_of(norm, centres=kind is nn.LayerNorm, like=torch.zeros(1, dtype=F64).expand(1, 24))
    close(gain, norm.weight.detach(), 10.0)
    close(bias, torch.zeros_like(gain) if kind is nn.RMSNorm else norm.bias.detach(), 1e-6)
    assert math.isclose(found, eps, rel_tol=1e-9)
