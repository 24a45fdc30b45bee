"""What observe and register put into a model is taken out again; every way of computing attention is met."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

import gradlogz
from gradlogz.attention.in_models.intercepted_calls import logits_from_softmax
from gradlogz.attention.in_models.interception import _interceptions, _original
from support.architectures import ARCHITECTURES
from support.scales import close
from support.small_trainings import GPT, Encoder, batches

F64 = torch.float64


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def small(name, implementation="eager"):
    return next(a for a in ARCHITECTURES if a.name == name).build(implementation)


def inputs_of(name, padding=None):
    return next(a for a in ARCHITECTURES if a.name == name).inputs(padding)


def implementations(model):
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


# Restoration ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_taken_away(error):
    model, inputs, interface = small("gpt2"), inputs_of("gpt2"), AttentionInterface.get_interface
    expected, keys = model(**inputs).logits, set(model.state_dict())

    def block():
        with gradlogz.observe(model):
            model(**inputs)
            if error is not None:
                raise error

    with contextlib.nullcontext() if error is None else pytest.raises(error):
        block()
    assert hooks(model) == 0
    assert not _interceptions
    assert not _original
    assert AttentionInterface.get_interface is interface
    assert set(model.state_dict()) == keys
    assert torch.equal(model(**inputs).logits, expected)


def test_an_error_inside_the_model_leaves_the_next_pass_whole():
    model = GPT().eval()
    with gradlogz.observe(model) as seen:
        with pytest.raises(IndexError):
            model(torch.full((1, 3), 1000))
        model(batches(1)[0])
        assert list(seen) == ["blocks.0.attention", "blocks.1.attention"]
    assert torch.overrides._get_current_function_mode() is None


def test_every_part_of_a_model_is_set_and_set_back():
    model, inputs = small("t5"), inputs_of("t5", "right")
    before, expected = implementations(model), model(**inputs).logits
    assert set(before) == {"eager"}
    gradlogz.register(model)
    gradlogz.register(model)  # again is the same
    assert set(implementations(model)) == {"gradlogz"}
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-4)
    gradlogz.attention.unregister(model)
    assert implementations(model) == before
    assert torch.equal(model(**inputs).logits, expected)
    gradlogz.register(model)
    gradlogz.attention.unregister()
    assert implementations(model) == before
    gradlogz.attention.unregister()  # again is the same


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_watched_model_is_not_watched(copied):
    """As averages of weights and snapshots of a training are made."""
    model, ids = GPT(dropout=0.0), batches(1)[0]
    with gradlogz.observe(model) as seen:
        other = copied(model)
        assert torch.equal(other(ids), other(ids))
        assert len(seen.passes) == 0
    assert torch.equal(other(ids), model(ids))


def test_a_pass_while_an_error_is_handled_is_seen():
    """As when a batch is too large and a smaller one is tried."""
    model = Encoder(0.0)
    try:
        raise MemoryError
    except MemoryError:
        with gradlogz.observe(model) as seen:
            model(batches(1)[0])
    assert list(seen) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


@pytest.mark.parametrize("outer", ["model", "part"])
def test_a_model_and_its_part_are_observed_at_once(outer):
    model = GPT().eval()
    whole, part = gradlogz.observe(model), gradlogz.observe(model.blocks[0])
    with contextlib.ExitStack() as stack:
        contexts = [whole, part] if outer == "model" else [part, whole]
        found = {id(context): stack.enter_context(context) for context in contexts}
        model(batches(1)[0])
    assert list(found[id(whole)]) == ["blocks.0.attention", "blocks.1.attention"]
    assert list(found[id(part)]) == ["attention"]
    assert torch.equal(found[id(part)]["attention"].entropy, found[id(whole)]["blocks.0.attention"].entropy)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler looks at it
@pytest.mark.parametrize("how", ["wrapped", "in place", "a block"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_compiled_model_is_observed_as_it_is_written(how, warm):
    torch._dynamo.reset()
    model, ids = GPT().eval(), batches(1)[0]
    expected, call = model(ids), model
    if how == "wrapped":
        call = torch.compile(model, backend="eager")
    else:
        (model if how == "in place" else model.blocks[0]).compile(backend="eager")
    if warm:
        call(ids)
    with gradlogz.observe(call) as seen:
        torch.testing.assert_close(call(ids), expected, rtol=1e-5, atol=1e-5)
    assert list(seen) == ["blocks.0.attention", "blocks.1.attention"]


# Every way to compute attention --------------------------------------------------------------------------------------


class Written(nn.Module):
    """Attention as people write it; `how` is the last line."""

    def __init__(self, how, heads=2, size=8):
        super().__init__()
        self.how, self.num_heads = how, heads
        self.query, self.key, self.value = (nn.Linear(size, size, dtype=F64) for _ in range(3))

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        return self.how(self, q, k, v).transpose(1, 2).flatten(2)


def logits(q, k):
    return q @ k.mT / q.shape[-1] ** 0.5


def folded(self, q, k, v):
    """Heads in the batch, as older code has it."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return (torch.softmax(logits(q, k), 2) @ v).unflatten(0, (-1, self.num_heads))


class WrittenAttention(Written):
    """Named so that its softmax is known for attention."""


WAYS = {
    "torch's function": (Written, lambda _, q, k, v: functional.scaled_dot_product_attention(q, k, v)),
    "attend": (Written, lambda _, q, k, v: gradlogz.attend(q, k, v).output),
    "attend with moments": (Written, lambda _, q, k, v: gradlogz.attend(q, k, v, statistics="moments").output),
    "attend, none": (Written, lambda _, q, k, v: gradlogz.attend(q, k, v, statistics="none").output),
    "functional.softmax": (WrittenAttention, lambda _, q, k, v: functional.softmax(logits(q, k), dim=-1) @ v),
    "torch.softmax": (WrittenAttention, lambda _, q, k, v: torch.softmax(logits(q, k), dim=-1) @ v),
    "Tensor.softmax": (WrittenAttention, lambda _, q, k, v: logits(q, k).softmax(-1) @ v),
    "nn.Softmax": (WrittenAttention, lambda _, q, k, v: nn.Softmax(-1)(logits(q, k)) @ v),
    "heads in the batch": (WrittenAttention, folded),
}


@pytest.mark.parametrize("way", WAYS)
def test_attention_is_met_however_it_is_written(way):
    torch.manual_seed(0)
    kind, how = WAYS[way]
    model, x = kind(how), torch.randn(3, 5, 8, dtype=F64, requires_grad=True)
    expected = model(x)
    with gradlogz.observe(model) as seen:
        actual = model(x)
    close(actual, expected)
    (found,) = seen.values()
    q, k = (model.split(f(x)) for f in (model.query, model.key))
    s = logits(q, k)
    p = s.softmax(-1)
    close(found.log_normalizer, s.logsumexp(-1))
    close(found.entropy, -(p * p.log()).sum(-1))
    close(found.mean_logit, (p * s).sum(-1))
    close(found.logit_variance, (p * s.square()).sum(-1) - (p * s).sum(-1).square())
    close(found.max_logit, s.amax(-1))
    for statistic in (found.log_normalizer, found.entropy, found.logit_variance):
        weight = torch.randn(statistic.shape, dtype=F64)
        (actual,) = torch.autograd.grad((statistic * weight).sum(), x, retain_graph=True)
        assert bool(torch.isfinite(actual).all())
        assert bool((actual != 0).any())


@pytest.mark.parametrize(("m", "n"), [(4, 4), (3, 7), (7, 3)])
def test_the_causal_flag_of_torch_counts_from_the_first_key(m, n):
    class Cross(nn.Module):
        def forward(self, q, k):
            return functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = torch.randn(2, 2, m, 8, dtype=F64), torch.randn(2, 2, n, 8, dtype=F64)
    model = Cross()
    with gradlogz.observe(model) as seen:
        close(model(q, k), model.forward(q, k))
    mask = torch.ones(m, n, dtype=torch.bool).tril()
    close(seen[""].log_normalizer, logits(q, k).masked_fill(~mask, -torch.inf).logsumexp(-1))


def test_torchs_own_layers_are_met():
    torch.manual_seed(0)
    for model in (Encoder(0.0).eval(), Encoder(0.0).train()):
        ids = batches(1)[0]
        ids[1, 8:] = 0
        expected = model(ids)
        with gradlogz.observe(model) as seen:
            torch.testing.assert_close(model(ids)[ids != 0], expected[ids != 0], rtol=1e-5, atol=1e-5)
        assert list(seen) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
        weights = model.encoder.layers[0].self_attn(
            *[model.embedding(ids)] * 3, key_padding_mask=ids == 0, average_attn_weights=False
        )[1]
        entropy = -torch.special.xlogy(weights, weights).sum(-1)
        torch.testing.assert_close(seen["encoder.layers.0.self_attn"].entropy, entropy, rtol=1e-4, atol=1e-5)


def test_our_layer_is_met_with_and_without_weights():
    layer = gradlogz.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    for need_weights in (True, False):
        with gradlogz.observe(layer) as seen:
            layer(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(seen[""].entropy, layer.attend(x, x, x)[1].entropy)


def test_experts_and_other_softmaxes_are_no_attention():
    model, inputs = small("mixtral"), inputs_of("mixtral")
    with gradlogz.observe(model) as seen:
        model(**inputs)
    assert list(seen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_a_layer_that_is_called_again_has_a_number():
    model, inputs = small("albert"), inputs_of("albert")
    with gradlogz.observe(model) as seen:
        model(**inputs)
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert list(seen) == [layer, f"{layer}#2", f"{layer}#3"]
    assert seen.stack("entropy").shape == (3, 2, 4, 12)


class Reflexive(GPT):
    """A model that calls itself."""

    def forward(self, ids, deep=True):
        if deep:
            self(ids[:1], deep=False)
        return super().forward(ids)


def test_a_model_that_calls_itself_is_seen_in_one_pass():
    model = Reflexive().eval()
    with gradlogz.observe(model) as seen:
        model(batches(1)[0])
    assert len(seen.passes) == 1
    layers = ["blocks.0.attention", "blocks.1.attention"]
    assert list(seen) == [*layers, *(f"{layer}#2" for layer in layers)]
    assert [a.entropy.shape[0] for a in seen.values()] == [1, 1, 3, 3]


class Interrupted(nn.Module):
    """Is interrupted the first time."""

    def forward(self, x):
        if not hasattr(self, "done"):
            self.done = True
            raise KeyboardInterrupt
        return x


def test_a_pass_after_an_interrupted_one_is_whole():
    model = GPT().eval()
    model.blocks.insert(1, Interrupted())
    with gradlogz.observe(model) as seen:
        with pytest.raises(KeyboardInterrupt):
            model(batches(1)[0])
        model(batches(1)[0])
        assert torch.overrides._get_current_function_mode() is None
    assert [list(each) for each in seen.passes] == [
        ["blocks.0.attention"],
        ["blocks.0.attention", "blocks.2.attention"],
    ]


def test_passes_are_kept_and_forgotten():
    model = GPT().eval()
    with gradlogz.observe(model) as seen:
        assert repr(seen) == "Observation(0 layers, 0 passes)"
        for ids in batches(3):
            model(ids)
        assert len(seen.passes) == 3
        assert repr(seen) == "Observation(2 layers, 3 passes)"
        seen.clear()
        assert len(seen) == 0
        model(batches(1)[0])
        assert len(seen.passes) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_what_was_observed(reentrant):
    torch.manual_seed(0)
    plain, model = GPT(dropout=0.0), GPT(dropout=0.0, checkpointed=reentrant)
    model.load_state_dict(plain.state_dict())
    gradients = []
    for each in (plain, model):
        with gradlogz.observe(each) as seen:
            each(batches(1)[0]).square().mean().backward()
        gradients.append([p.grad for p in each.parameters()])
        assert len(seen) == 2
        assert len(seen.passes) == 1
    torch.testing.assert_close(gradients[0], gradients[1])


def test_moments_are_observed_too():
    model = GPT().eval()
    with gradlogz.observe(model, statistics="moments") as seen:
        model(batches(1)[0])
    found = seen["blocks.0.attention"]
    assert found.key_mean.shape == (3, 4, 14, 4)
    assert found.value_variance.shape == (3, 4, 14, 4)


HIDDEN = [-torch.inf, torch.finfo(torch.float32).min, -1e30, -1e9, -65504.0, -1e4]


@pytest.mark.parametrize("number", HIDDEN)
@pytest.mark.parametrize("written", [True, False])
def test_whatever_number_hides_a_key_the_statistics_are_those_of_the_others(number, written):
    torch.manual_seed(0)
    keys = torch.arange(5) < torch.tensor([[5], [3]])
    mask = torch.zeros(2, 1, 1, 5).masked_fill(~keys[:, None, None], number)

    def softened(_, q, k, v):
        return torch.softmax(logits(q, k) + mask, -1) @ v.to(mask.dtype)

    def computed(_, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = WrittenAttention(softened if written else computed).float()
    x = torch.randn(2, 5, 8, requires_grad=True)
    with gradlogz.observe(model) as seen:
        model(x)
    (found,) = seen.values()
    q, k = (model.split(f(x)) for f in (model.query, model.key))
    s = logits(q, k)[1, :, :, :3]
    p = s.softmax(-1)
    torch.testing.assert_close(found.entropy[1], -(p * p.log()).sum(-1))
    torch.testing.assert_close(found.logit_variance[1], (p * s.square()).sum(-1) - (p * s).sum(-1).square())
    (gradient,) = torch.autograd.grad(found.logit_variance.sum() + found.entropy.sum(), x)
    assert bool(torch.isfinite(gradient).all())


def test_heads_are_found_where_a_layer_has_them():
    """Windows of keys have the heads after the queries, blocks of queries the blocks after the heads."""
    layer = nn.Module()
    layer.num_heads = 3
    s = torch.randn(2, 3, 10, 7)
    forms = {
        "as usual": s,
        "in the batch": s.flatten(0, 1),
        "after the queries": s.transpose(1, 2),
        "before blocks": s.unflatten(2, (5, 2)),
    }
    for name, form in forms.items():
        assert torch.equal(logits_from_softmax(layer, form).logits, s), name
    blocks = torch.randn(2, 5, 3, 2, 7)
    assert torch.equal(logits_from_softmax(layer, blocks).logits, blocks.flatten(0, 1))
