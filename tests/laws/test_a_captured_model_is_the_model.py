"""Capture leaves a model as it is, and what it gives adds up: stream and updates, matrices and queries."""

import copy

import pytest
import torch

import gradlogz
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.following import follow
from gradlogz.probing.inside.weights import weights_of
from support.architectures import ARCHITECTURES
from support.scales import close

PLACEMENTS = {
    "post": ("bert", "roberta", "albert", "distilbert", "electra", "bart", "wav2vec2", "deberta-v2"),
    "sandwich": ("gemma2", "gemma3"),
    "inner": ("olmo2",),
}
PARALLEL = ("gpt_neox", "cohere", "falcon", "gptj")  # of attention and feed-forward map
ROTARY = (
    "modernbert", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "phi3", "granite",
    "cohere", "deepseek_v3", "mixtral", "olmo2", "falcon",
)  # fmt: skip
NORMALIZED = ("qwen3", "gemma3", "deepseek_v3", "olmo2")
OWN_LOGITS = ("bloom", "gptj", "deberta-v2")
SINGLE = ("gpt_oss", "deepseek_v3", "mixtral")  # experts know no float64


def built(architecture):
    model = architecture.build("sdpa" if "sdpa" in architecture.implementations else "eager")
    inputs = architecture.inputs(None if architecture.kind in ("image", "sound") else "right")
    if architecture.name in SINGLE:
        return model, inputs
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_outputs_are_the_models_and_the_updates_add_up(architecture):
    model, inputs = built(architecture)
    with torch.no_grad():
        expected = [t for t in model(**inputs).values() if torch.is_tensor(t)]
    found = gradlogz.capture(model, inputs)
    output = [t for t in found.output.values() if torch.is_tensor(t)]
    tolerance = 1e-5 if architecture.name in (*SINGLE, "gemma2") else 1e-12  # gemma2 takes its softmax in float32
    for mine, theirs in zip(output, expected, strict=True):
        assert float((mine - theirs).abs().max()) <= tolerance * (1 + float(theirs.abs().max()))
    by_sum = {}
    for passed in found.sublayers.values():
        by_sum.setdefault(passed.sublayer.sum, []).append(passed)
    for branches in by_sum.values():
        total = branches[0].stream + sum(p.update for p in branches)
        close(total, branches[0].after, scale=100 * float(total.abs().max()) * torch.finfo(total.dtype).eps / 2e-16)
    assert len(by_sum) == len(found.sublayers) / (2 if architecture.name in ("gpt_neox", "falcon", "gptj") else 1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_layout_is_that_of_the_architecture(architecture):
    model, inputs = built(architecture)
    layout = discover(model, inputs)
    expected = next((p for p, names in PLACEMENTS.items() if architecture.name in names), "pre")
    kinds = [s.kind for s in layout.sublayers]
    streams = [name for name in layout.attention if layout.branch_of(name) is not None]
    assert layout.width == 32
    assert len(streams) == len(layout.attention) - (architecture.name == "siglip")  # whose head asks with one vector
    assert kinds.count("attention") == len(streams)
    blocks = {s.name: s.placement for s in layout.sublayers}
    skipped = ("layers.0.attn",) if architecture.name == "modernbert" else ("head.mlp", "pos_conv")  # no norm there
    assert {p for name, p in blocks.items() if not any(s in name for s in skipped)} == {expected}
    for sublayer in layout.sublayers:
        norm = sublayer.reads or sublayer.norm_of_stream
        if norm is not None:
            stored = dict(model.named_modules())[norm.name]
            weight = stored.weight.detach().double()
            exact = 1 + weight if architecture.name in ("gemma2", "gemma3") else weight
            close(norm.gain, exact, scale=1.0)
            assert norm.centres == (
                getattr(stored, "bias", None) is not None or architecture.name in ("cohere", "modernbert")
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3"])
def test_matrices_in_half_precision_are_those_of_the_weights(name, dtype):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    model, inputs = architecture.build().to(dtype), architecture.inputs("right")
    half, exact = (
        weights_of(each, discover(each, inputs), inputs) for each in (model, copy.deepcopy(model).to(torch.float32))
    )
    for layer, w in half.items():
        assert not isinstance(w, str), w
        assert (w.rotary, w.normalized) == (name in ROTARY, name in NORMALIZED)
        norm, same = w.norm, exact[layer].norm
        assert norm[:3] == same[:3]
        assert torch.equal(norm.gain, same.gain)
        assert torch.equal(norm.bias, same.bias)
        for one, other in zip(w[:7], exact[layer][:7], strict=True):
            assert float((one - other).abs().max()) <= 4 * torch.finfo(dtype).eps * float(other.abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_the_matrices_give_the_queries_keys_and_updates(architecture):
    model, inputs = built(architecture)
    found = gradlogz.capture(model, inputs)
    weights = weights_of(model, found.architecture, inputs)
    # In float64 too, some models turn and normalise in float32.
    rounding = 1e-4 if architecture.name in SINGLE else 1e-5 if architecture.name in ROTARY else 1e-9
    for layer, attended in found.attention.items():
        w = weights[layer]
        if architecture.name in OWN_LOGITS:
            assert w == "it computes its own logits"
            assert isinstance(attended.call, torch.Tensor)
            with pytest.raises(ValueError, match="queries"):
                attended.query  # noqa: B018
            continue
        if attended.sublayer is None:
            continue
        assert not isinstance(w, str), w
        assert (w.rotary, w.normalized) == (architecture.name in ROTARY, architecture.name in NORMALIZED)
        passed = found.sublayers[layer]
        h = attended.query.shape[1]
        z = passed.input.double()
        q = torch.einsum("bne,hed->bhnd", z, w.query) + w.query_bias.unsqueeze(1)
        first = slice(0, 1) if w.rotary else slice(None)
        if not w.normalized:
            assert float((q - attended.query)[:, :, first].abs().max()) <= rounding * float(q.abs().max())
        folded = w.folded
        if w.norm is not None:
            plain = (z - w.norm.bias) / w.norm.gain
            again = torch.einsum("bne,hed->bhnd", plain, folded.query) + folded.query_bias.unsqueeze(1)
            close(again, q, scale=1e3 * float(q.abs().max()))
        if not attended.crosses:
            v = torch.einsum("bne,hed->bhnd", z, w.value) + w.value_bias.unsqueeze(1)
            theirs = attended.value.repeat_interleave(h // attended.value.shape[1], 1)
            if architecture.name != "deepseek_v3":  # whose values pass a norm of their own
                assert float((v - theirs).abs().max()) <= rounding * float(v.abs().max())
        if passed.sublayer.closes is None:
            assert w.output is not None
            u = torch.einsum("bhnv,hvd->bnd", attended.attention.output.double(), w.output)
            change = passed.update.double() - u
            steady = change - change[:1, :1]  # the bias
            scaled = architecture.name == "granite"
            if not scaled:
                assert float(steady.abs().max()) <= rounding * float(u.abs().max())


def test_a_model_in_training_is_left_in_training():
    model = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.5, batch_first=True).train()
    state = torch.random.get_rng_state()
    found = gradlogz.capture(model, {"src": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))})
    assert model.training
    assert model.dropout.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [s.sublayer.kind for s in found.sublayers.values()] == ["attention", "feed_forward"]


def test_what_is_written_in_place_is_captured_as_it_was():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
            self.norm, self.map = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

        def forward(self, x):
            z = self.norm(x)
            y = self.attention(z, z, z, need_weights=False)[0]
            y += x
            x = y
            u = torch.nn.functional.gelu(self.map(x))
            x = x.clone()
            x += u
            return x

    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    found = gradlogz.capture(Block().eval(), {"x": x})
    first, second = found.sublayers.values()
    assert torch.equal(first.stream, x)
    assert first.sublayer.placement == "pre"
    for passed in (first, second):
        assert torch.equal(passed.stream + passed.update, passed.after)


def test_what_is_computed_of_an_event_is_no_part_of_the_model():
    """A block that attends in its own forward: sums of the one who is told must not be counted among its own."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            q, k, v = (m(x).unflatten(-1, (4, 4)).transpose(1, 2) for m in self.maps[:3])
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return x + self.maps[3](o.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Attention().eval()
    x = torch.randn(2, 5, 16)
    layout = discover(model, {"x": x})
    told = []

    def tell(event):
        told.append(event)
        for _ in range(3):
            assert (x + x).shape == x.shape

    with follow(model, layout, tell):
        y = model(x)
    passed = told[-1]
    assert torch.equal(passed.after, y)
    assert torch.equal(passed.stream, x)
