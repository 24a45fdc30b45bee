"""After qk_clip the largest logit of a head is tau, by the formulas of [kimi25]; heads below tau do not change."""

import copy
import math
import socket

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gradlogz
from gradlogz.attention import qk_clip
from support.architectures import ARCHITECTURES
from support.attention_layers import LAYERS
from support.clipped_ranks import clipped_rank, initial_model, largest_of_rank
from support.small_trainings import GPT, batches, train

# Logits of the others have a position bias or a soft cap, or their experts are not computed in float64.
PRODUCTS = (
    "bert", "albert", "distilbert", "gpt2", "gpt_neox", "opt", "llama", "qwen2", "qwen3", "phi3", "olmo2", "bart",
    "whisper", "vit", "siglip", "falcon", "deberta-v2",
)  # fmt: skip
LATENT = {"first_k_dense_replace": 2}


def build(name, **options):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in architecture.inputs().items()}
    return architecture.build(**options).double(), inputs


def largest(model, inputs):
    """Largest logit of each head in each layer, [h]."""
    with gradlogz.observe(model) as observation, torch.no_grad():
        model(**inputs)
    return {name: layer.max_logit.amax((0, 2)) for name, layer in observation.items()}


def check_bound(before, after, gamma, tau, *, tolerance=1e-12):
    scale = before.abs().max()
    assert (after - gamma * before).abs().max() < tolerance * scale
    assert (after <= tau + tolerance * scale).all()
    above = before > tau
    assert ((after - tau)[above & (gamma * before > 0.999 * tau)].abs() < tolerance * scale).all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_largest_logit_of_each_layer_becomes_tau(name):
    model, inputs = build(name)
    before = largest(model, inputs)
    for layer in [name for name in before if "#" not in name]:
        clipped, tau = copy.deepcopy(model), 0.9 * float(before[layer].median())
        gamma = qk_clip(clipped, {layer: before[layer]}, tau)[layer]
        assert bool((gamma < 1).any())
        check_bound(before[layer], largest(clipped, inputs)[layer], gamma, tau)


# The formulas, written out on small layers --------------------------------------------------------------------------


class Separate(nn.Module):
    """Attention with rotary positions, whose key heads may be shared and whose heads may be normalised."""

    def __init__(self, heads=4, key_heads=4, bias=True, norm=None, d=6):
        super().__init__()
        self.heads, self.num_key_value_heads, self.d = heads, key_heads, d
        self.wq, self.wk = nn.Linear(16, heads * d, bias), nn.Linear(16, key_heads * d, bias)
        if norm is not None:
            self.q_norm, self.k_norm = norm(heads), norm(key_heads)
        self.double()

    def queries_and_keys(self, x):
        q, k = (p(x).unflatten(-1, (-1, self.d)) for p in (self.wq, self.wk))
        if hasattr(self, "q_norm"):
            q, k = (self.q_norm(q), self.k_norm(k))
        return rotated(q.transpose(-2, -3)), rotated(k.transpose(-2, -3))

    def forward(self, x):
        q, k = self.queries_and_keys(x)
        return functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


def rotated(x):
    """Pairs of coordinates, turned by position times frequency: RoPE by its definition, as complex numbers."""
    n, d = x.shape[-2:]
    angles = torch.arange(n, dtype=torch.float64).unsqueeze(-1) * 10000.0 ** (-2 * torch.arange(d // 2).double() / d)
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def causal_maxima(q, k, scale):
    """Largest causal logit of each head; q [b, h, n, d], k [b, g, n, d]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.mT * scale
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -math.inf).amax((0, 2, 3)).detach()


def tokens(seed=0):
    return 3 * torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
def test_queries_and_keys_have_the_root_of_the_factor(bias):
    torch.manual_seed(0)
    layer, x = Separate(bias=bias), tokens()
    before = causal_maxima(*layer.queries_and_keys(x), 6**-0.5)
    tau, weights = float(before.median()), copy.deepcopy(layer.state_dict())
    gamma = qk_clip(layer, {"": before}, tau, projections=("wq", "wk"))[""]
    for h in range(4):
        factor = math.sqrt(tau / float(before[h])) if before[h] > tau else 1.0
        for name, parameter in layer.state_dict().items():
            rows = slice(6 * h, 6 * (h + 1))
            if factor == 1.0:
                assert torch.equal(parameter[rows], weights[name][rows]), "heads below tau do not change by a bit"
            assert torch.allclose(parameter[rows], factor * weights[name][rows], rtol=1e-15, atol=0.0)
    check_bound(before, causal_maxima(*layer.queries_and_keys(x), 6**-0.5), gamma, tau)
    assert 0 < int((gamma == 1).sum()) < 4


def test_a_shared_key_head_has_the_least_factor_of_its_group():
    """eta_g = min(1, tau / max over group g), and both projections of a group have its root: as in Megatron-LM."""
    torch.manual_seed(0)
    layer, x = Separate(heads=6, key_heads=3), tokens()
    before = causal_maxima(*layer.queries_and_keys(x), 6**-0.5)
    groups = before.reshape(3, 2).amax(1)
    tau, weights = float(groups.median()) * 0.99, copy.deepcopy(layer.state_dict())
    gamma = qk_clip(layer, {"": before}, tau)[""]
    eta = torch.clamp(tau / groups, max=1.0)
    assert 0 < int((eta < 1).sum()) < 3
    assert torch.equal(gamma, eta.repeat_interleave(2))
    for g in range(3):
        for name, size in (("wq", 12), ("wk", 6)):
            rows = slice(size * g, size * (g + 1))
            expected = weights[f"{name}.weight"][rows] * eta[g].pow(0.5)
            assert torch.allclose(layer.state_dict()[f"{name}.weight"][rows], expected, rtol=1e-15, atol=0.0)
    check_bound(before, causal_maxima(*layer.queries_and_keys(x), 6**-0.5), gamma, tau)


class Fused(nn.Module):
    """Rows [q; k; v], or [q, k, v] for each head."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.add_module(name, nn.Linear(16, 48).double())
        self.name = name

    def logit_parts(self, x):
        y = getattr(self, self.name)(x)
        if self.name == "query_key_value":
            parts = y.unflatten(-1, (4, 3, 4)).unbind(-2)
        else:
            parts = y.unflatten(-1, (3, 4, 4)).unbind(-3)
        return [t.transpose(1, 2) for t in parts]


@pytest.mark.parametrize("name", ["qkv", "c_attn", "query_key_value", "of_another_name"])
def test_fused_projections_keep_their_values(name):
    layer, x = Fused(name), tokens()
    q, k, v = layer.logit_parts(x)
    before = causal_maxima(q, k, 0.5)
    tau = float(before.median())
    explicit = "of_another_name" if name == "of_another_name" else None
    gamma = qk_clip(layer, {"": before}, tau, projections=explicit)[""]
    q, k, values = layer.logit_parts(x)
    assert torch.equal(values, v)
    check_bound(before, causal_maxima(q, k, 0.5), gamma, tau)


@pytest.mark.parametrize("lora", [16, None])
def test_latent_attention_leaves_the_shared_rotary_key(lora):
    """q^C and k^C have sqrt(gamma), q^R has gamma, k^R and values have 1. Logits by hand, RoPE by its definition."""
    model, inputs = build("deepseek_v3", q_lora_rank=lora, **LATENT)
    layer, (h, nope, rope, value) = model.model.layers[0].self_attn, (4, 8, 4, 6)
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(inputs["input_ids"]))

    @torch.no_grad()
    def parts():
        q = layer.q_proj(x) if lora is None else layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        latent, k_r = layer.kv_a_proj_with_mqa(x).split([8, rope], -1)
        k = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (h, nope + value))
        q_c, q_r = q.unflatten(-1, (h, nope + rope)).split([nope, rope], -1)
        k_c, v = k.split([nope, value], -1)
        return [t.transpose(1, 2) for t in (q_c, q_r, k_c, k_r.unsqueeze(2), v)]

    def maxima():
        q_c, q_r, k_c, k_r, _ = parts()
        k = torch.cat((k_c, rotated(k_r).expand(-1, h, -1, -1)), -1)
        return causal_maxima(torch.cat((q_c, rotated(q_r)), -1), k, (nope + rope) ** -0.5)

    name, before, old = "model.layers.0.self_attn", maxima(), parts()
    assert torch.allclose(largest(model, inputs)[name], before, rtol=1e-6)  # transformers rotates in float32
    tau = float(before.median())
    gamma = qk_clip(model, {name: before}, tau)[name]
    assert torch.equal(gamma, torch.clamp(tau / before, max=1.0))
    g = gamma.reshape(h, 1, 1)
    for new, was, factor in zip(parts(), old, (g.sqrt(), g, g.sqrt(), 1.0, 1.0), strict=True):
        assert torch.allclose(new, factor * was, rtol=1e-13, atol=1e-14)
    check_bound(before, maxima(), gamma, tau)


# Norms of queries and keys --------------------------------------------------------------------------------------------


class UnitOffset(nn.RMSNorm):
    """A gain of 1 + weight, as in Gemma."""

    def forward(self, x):
        return functional.rms_norm(x, self.normalized_shape, 1.0 + self.weight)


def with_gains(norm):
    for name, p in norm.named_parameters():
        nn.init.normal_(p, 0.0 if name == "bias" else 2.0, 0.5)
    return norm


NORMS = {
    "shared gain": lambda heads: with_gains(nn.RMSNorm(6)),
    "gain and bias": lambda heads: with_gains(nn.LayerNorm(6)),
    "1 + weight": lambda heads: with_gains(UnitOffset(6)),
    "gain per head": lambda heads: with_gains(nn.RMSNorm((heads, 6))),
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_gains_of_norms_are_scaled_where_they_undo_the_scale_of_projections(norm, key_heads):
    torch.manual_seed(0)
    layer, x = Separate(key_heads=key_heads, norm=NORMS[norm]), tokens()
    before = causal_maxima(*layer.queries_and_keys(x), 6**-0.5)
    tau, weight = 0.8 * float(before.amax()), layer.wq.weight.clone()
    gamma = qk_clip(layer, {"": before}, tau)[""]
    assert torch.equal(layer.wq.weight, weight)
    assert (norm == "gain per head") == (len(gamma.unique()) > 1)
    check_bound(before, causal_maxima(*layer.queries_and_keys(x), 6**-0.5), gamma, tau)


# Layers of torch and of this package ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, gradlogz.MultiheadAttention])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 12, "vdim": 10}, {"add_bias_kv": True}], ids=str)
def test_the_layer_of_torch_is_clipped(kind, options):
    torch.manual_seed(0)
    layer = kind(16, 4, batch_first=True, dtype=torch.float64, **options)
    x, y, z = tokens(), tokens(1)[..., : options.get("kdim", 16)], tokens(2)[..., : options.get("vdim", 16)]

    def maxima():
        with gradlogz.observe(layer) as observation:
            layer(x, y, z)
        return observation[""].max_logit.amax((0, 2)).detach()

    before = maxima()
    tau = float(before.median())
    gamma = qk_clip(layer, {"": before}, tau)[""]
    assert 0 < int((gamma < 1).sum()) < 4
    check_bound(before, maxima(), gamma, tau)


@pytest.mark.parametrize("name", ["gated, free", "gated, tied", "link, gaussian", "link, spins"])
def test_layers_of_this_package_are_clipped(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name].build(dtype=torch.float64), torch.tanh(tokens()[..., :8])
    with gradlogz.observe(layer) as observation:
        layer(x, is_causal=True)
    before = observation[""].max_logit.amax((0, 2)).detach()
    tau = float(before.mean())
    gamma = qk_clip(layer, observation, tau)[""]
    with gradlogz.observe(layer) as observation:
        layer(x, is_causal=True)
    check_bound(before, observation[""].max_logit.amax((0, 2)).detach(), gamma, tau)


# Statistics, dtypes, processes ----------------------------------------------------------------------------------------


def test_a_row_of_the_monitor_is_statistics():
    torch.manual_seed(0)
    model = GPT(dropout=0.0).double()
    with gradlogz.monitor(model, every=1) as m:
        train(model, batches(1))
        before = {name: p.clone() for name, p in model.named_parameters()}
        row = m.row()
    tau = float(row.layers["blocks.0.attention"].max_logit.greatest.median())
    gamma = qk_clip(torch.compile(model, backend="eager"), row, tau)
    assert gamma.keys() == row.layers.keys()
    for name, p in model.named_parameters():
        layer = name.removesuffix(".qkv.weight").removesuffix(".qkv.bias")
        factors = gamma[layer].sqrt().repeat_interleave(4) if layer in gamma else torch.ones(16)
        factors = torch.cat((factors, factors, torch.ones(16))) if layer in gamma else torch.ones(len(p))
        assert torch.equal(p, before[name] * factors.reshape(-1, *(1,) * (p.ndim - 1)))


def test_calls_of_one_layer_have_one_largest_logit():
    first, second = torch.tensor([50.0, 200.0]), torch.tensor([400.0, 10.0])
    layer = nn.MultiheadAttention(8, 2)
    gamma = qk_clip(layer, {"": first, "#2": second})
    assert torch.equal(gamma[""], torch.tensor([0.25, 0.5]))


def test_logits_that_are_not_finite_clip_nothing():
    layer = nn.MultiheadAttention(8, 4)
    weight = layer.in_proj_weight.clone()
    gamma = qk_clip(layer, {"": torch.tensor([math.nan, math.inf, -math.inf, 99.0])})
    assert torch.equal(gamma[""], torch.ones(4))
    assert torch.equal(layer.in_proj_weight, weight)


def test_weights_of_half_precision_are_rounded_once():
    layer = nn.MultiheadAttention(8, 2, dtype=torch.bfloat16)
    weight = layer.in_proj_weight.detach().float()
    qk_clip(layer, {"": torch.tensor([300.0, 50.0])})
    factors = torch.ones(24)
    factors[0:4] = factors[8:12] = math.sqrt(1 / 3)
    assert torch.equal(layer.in_proj_weight, (weight * factors.unsqueeze(1)).bfloat16())


class Synchronisations(TorchDispatchMode):
    """Operators that wait for the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._opname not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "deepseek_v3"])
def test_clipping_does_not_wait_for_the_device(name):
    model, inputs = build(name, **(LATENT if name == "deepseek_v3" else {}))
    statistics = largest(model, inputs)
    qk_clip(model, statistics, 1e9)  # once for each class of norms its formula is read
    with Synchronisations():
        qk_clip(model, statistics, 1e-3)


def test_processes_clip_alike_by_one_reduction(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(clipped_rank, (port, str(tmp_path)), nprocs=2)
    model = initial_model()
    together = {name: torch.maximum(s, largest_of_rank(1)[name]) for name, s in largest_of_rank(0).items()}
    qk_clip(model, {name: s.double() for name, s in together.items()})
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for kind in ("replicated", "sharded"):
            assert results[kind]["reductions"] == 1
            assert all(torch.equal(results[kind]["parameters"][name], p) for name, p in model.named_parameters())
