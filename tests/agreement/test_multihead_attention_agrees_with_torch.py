"""`MultiheadAttention` and torch's give the same results for every combination of their options, and share weights."""

import copy
import io
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gradlogz import MultiheadAttention, attend

CONSTRUCTORS = [
    {"bias": bias, "add_bias_kv": kv, "add_zero_attn": zero, **sizes}
    for bias, kv, zero in itertools.product((True, False), (False, True), (False, True))
    for sizes in ({}, {"kdim": 5, "vdim": 7})
]
LAYOUTS = ["batch first", "sequence first", "no batch"]
B, M, N, E, H = 2, 5, 5, 8, 4


def pairs(dtype):
    """A mask of pairs that leaves something to everyone: True = do not attend."""
    hidden = (torch.rand(M, N) < 0.4) & ~torch.eye(M, N, dtype=torch.bool)
    return {
        "none": None,
        "bool": hidden,
        "float": torch.randn(M, N, dtype=dtype),
        "bool, per head": torch.stack([hidden.roll(i) & ~torch.eye(M, N, dtype=torch.bool) for i in range(B * H)]),
        "float, per head": torch.randn(B * H, M, N, dtype=dtype),
        "infinite": torch.zeros(M, N, dtype=dtype).masked_fill(hidden, -torch.inf),
    }


def padding(dtype):
    late = (torch.arange(N) == N - 1).expand(B, N) & torch.tensor([[True], [False]])
    return {"none": None, "bool": late, "float": torch.randn(B, N, dtype=dtype)}


PAIRS, PADDING = list(pairs(torch.float64)), list(padding(torch.float64))


def twins(dtype=torch.float64, **options):
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(E, H, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def operands(layer, layout, dtype=torch.float64):
    q, k, v = (torch.randn(B, n, e, dtype=dtype) for n, e in ((M, E), (N, layer.kdim), (N, layer.vdim)))
    if layout == "no batch":
        return q[0], k[0], v[0]
    return (q, k, v) if layout == "batch first" else tuple(t.transpose(0, 1) for t in (q, k, v))


@pytest.mark.parametrize("keys", PADDING)
@pytest.mark.parametrize("mask", PAIRS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_weights_agree(layout, mask, keys):
    attn_mask, key_padding_mask = pairs(torch.float64)[mask], padding(torch.float64)[keys]
    if layout == "no batch":
        attn_mask = attn_mask[:H] if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[0]
    for constructor in CONSTRUCTORS:
        ours, theirs = twins(batch_first=layout == "batch first", **constructor)
        given = operands(ours, layout)
        for need, average in ((False, True), (True, True), (True, False)):
            asked = {
                "key_padding_mask": key_padding_mask,
                "attn_mask": attn_mask,
                "need_weights": need,
                "average_attn_weights": average,
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch: masks of two kinds
                expected = theirs(*given, **asked)
            actual = ours(*given, **asked)
            torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-11)
            assert (actual[1] is None) == (expected[1] is None)
            if need:
                torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_self_attention_agrees(layout):
    ours, theirs = twins(batch_first=layout == "batch first")
    x, _, _ = operands(ours, layout)
    for need in (False, True):
        for actual, expected in zip(ours(x, x, x, need_weights=need), theirs(x, x, x, need_weights=need), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("keys", PADDING)
def test_the_causal_hint_agrees(keys, need):
    ours, theirs = twins(batch_first=True)
    x, _, _ = operands(ours, "batch first")
    asked = {"key_padding_mask": padding(torch.float64)[keys], "is_causal": True, "need_weights": need}
    causal = torch.ones(M, M, dtype=torch.bool).triu(1)
    if keys == "float":
        causal = torch.zeros(M, M, dtype=torch.float64).masked_fill(causal, -torch.inf)
    expected = theirs(x, x, x, attn_mask=causal, **asked)
    for attn_mask in (causal, None):  # torch asks for the mask beside the hint
        for actual, of_torch in zip(ours(x, x, x, attn_mask=attn_mask, **asked), expected, strict=True):
            torch.testing.assert_close(actual, of_torch, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_keys_of_the_layer_are_seen_by_causal_queries_too(options):
    ours, theirs = twins(batch_first=True, **options)
    x, _, _ = operands(ours, "batch first")
    causal = torch.ones(M, M, dtype=torch.bool).triu(1)
    expected = theirs(x, x, x, attn_mask=causal)[0]  # with the hint torch would forget its own keys
    torch.testing.assert_close(ours.attend(x, x, x, is_causal=True)[0], expected, rtol=0, atol=1e-12)


def test_more_keys_than_queries_and_the_hint_take_the_mask():
    ours, theirs = twins(batch_first=True)
    q, k = torch.randn(B, 3, E, dtype=torch.float64), torch.randn(B, 6, E, dtype=torch.float64)
    mask = torch.ones(3, 6, dtype=torch.bool).triu(1)
    expected = theirs(q, k, k, attn_mask=mask)[0]
    actual = ours(q, k, k, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=str)
def test_initial_values_are_those_of_torch(constructor):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, dropout=0.1, **constructor)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, dropout=0.1, **constructor)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=str)
def test_state_dicts_load_in_both_directions(constructor):
    theirs, ours = nn.MultiheadAttention(E, H, **constructor), MultiheadAttention(E, H, **constructor)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    theirs.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    other = MultiheadAttention(E, H, **constructor)
    other.load_state_dict(theirs.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("constructor", CONSTRUCTORS[:4], ids=str)
def test_gradients_agree(constructor):
    ours, theirs = twins(**constructor)
    given = operands(ours, "sequence first")
    for need in (False, True):
        gradients = []
        for layer in (ours, theirs):
            leaves = [t.detach().requires_grad_() for t in given]
            output, weights = layer(*leaves, need_weights=need)
            loss = output.sin().sum() + (weights.square().sum() if need else 0.0)
            gradients.append(torch.autograd.grad(loss, [*leaves, *layer.parameters()]))
        for actual, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_dropout_with_weights_drops_what_torch_drops():
    ours, theirs = twins(dropout=0.5)
    given = operands(ours, "sequence first")
    found = []
    for layer in (ours, theirs):
        torch.manual_seed(1)
        found.append(layer(*given))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert bool((found[0][1] == 0).any())


def test_dropout_without_weights_is_right_on_average_and_absent_in_evaluation():
    ours, theirs = twins(dropout=0.3)
    given = operands(ours, "sequence first")
    expected = theirs.eval()(*given)[0]
    torch.testing.assert_close(ours.eval()(*given, need_weights=False)[0], expected, rtol=0, atol=1e-12)
    ours.train()
    mean = torch.stack([ours(*given, need_weights=False)[0] for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.2)
    assert not torch.equal(ours(*given, need_weights=False)[0], expected)


def test_a_converted_layer_shares_the_parameters():
    theirs = nn.MultiheadAttention(E, H, dropout=0.2, kdim=3, vdim=6, add_bias_kv=True, batch_first=True).eval()
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiheadAttention.from_torch(theirs)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert not ours.training
    assert not ours.out_proj.weight.requires_grad
    given = operands(ours, "batch first", torch.float32)
    torch.testing.assert_close(ours(*given)[0], theirs(*given)[0], rtol=0, atol=1e-5)


def test_a_converted_layer_keeps_hooks_and_parametrizations():
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    parametrizations.spectral_norm(theirs.eval(), "in_proj_weight")
    theirs.out_proj.register_forward_hook(lambda module, inputs, output: output + 1.0)
    ours, x = MultiheadAttention.from_torch(theirs), torch.randn(B, M, E, dtype=torch.float64)
    expected = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for target, source in ((expected, theirs), (expected.out_proj, theirs.out_proj)):
            for name, parameter in target.named_parameters(recurse=False):
                parameter.copy_(getattr(source, name))
    torch.testing.assert_close(ours(x, x, x)[0], expected(x, x, x)[0] + 1.0, rtol=0, atol=1e-12)


def test_the_statistics_are_those_of_each_head():
    ours, _ = twins(batch_first=True)
    x, y, _ = operands(ours, "batch first")
    output, heads = ours.attend(x, y, y, statistics="moments")
    q, k, v = (
        (t @ w.mT + b).reshape(B, -1, H, E // H).transpose(1, 2)
        for t, w, b in zip((x, y, y), ours.in_proj_weight.chunk(3), ours.in_proj_bias.chunk(3), strict=True)
    )
    for actual, expected in zip(heads[:9], attend(q, k, v, statistics="moments")[:9], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    by_hand = heads.output.transpose(1, 2).reshape(B, M, E) @ ours.out_proj.weight.mT + ours.out_proj.bias
    torch.testing.assert_close(output, by_hand, rtol=0, atol=1e-12)
    alone, of_one = ours.attend(x[1], y[1], y[1], statistics="moments")
    torch.testing.assert_close(alone, output[1], rtol=0, atol=1e-12)
    for one, all_of_them in zip(of_one[:9], heads[:9], strict=True):
        torch.testing.assert_close(one, all_of_them[1], rtol=0, atol=1e-12)


def test_a_query_that_sees_no_key_gives_the_bias_where_torch_gives_nan():
    ours, theirs = twins(batch_first=True)
    x, _, _ = operands(ours, "batch first")
    mask = torch.zeros(M, M, dtype=torch.bool)
    mask[2] = True
    output, weights = ours(x, x, x, attn_mask=mask)
    assert bool(theirs(x, x, x, attn_mask=mask)[0][:, 2].isnan().all())
    for found in (output, ours(x, x, x, attn_mask=mask, need_weights=False)[0]):
        torch.testing.assert_close(found[:, 2], ours.out_proj.bias.expand(B, E), rtol=0, atol=0)
    assert bool((weights[:, 2] == 0).all())
    gradients = torch.autograd.grad(output.sum(), list(ours.parameters()))
    assert all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize("norm_first", [False, True])
def test_inside_the_transformer_of_torch(norm_first):
    """Encoder and decoder layers, training and evaluation, causal and padded."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    encoder, decoder = nn.TransformerEncoderLayer(E, H, 16, **options), nn.TransformerDecoderLayer(E, H, 16, **options)
    ours = copy.deepcopy(encoder), copy.deepcopy(decoder)
    for layer in ours:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.MultiheadAttention):
                setattr(layer, name, MultiheadAttention.from_torch(module))
    x, memory = torch.randn(B, M, E, dtype=torch.float64), torch.randn(B, N, E, dtype=torch.float64)
    keys, causal = (
        padding(torch.float64)["bool"],
        nn.Transformer.generate_square_subsequent_mask(M, dtype=torch.float64),
    )
    late = torch.zeros(B, N, dtype=torch.float64).masked_fill(keys, -torch.inf)
    for training in (True, False):
        for layers in (ours, (encoder, decoder)):
            for layer in layers:
                layer.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                actual = ours[0](x, src_key_padding_mask=keys)
                torch.testing.assert_close(actual, encoder(x, src_key_padding_mask=keys), rtol=0, atol=1e-11)
                asked = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": late}
                actual, expected = ours[1](x, memory, **asked), decoder(x, memory, **asked)
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    stack = nn.TransformerEncoder(ours[0], 2, enable_nested_tensor=False)
    theirs = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
    torch.testing.assert_close(stack(x, mask=causal), theirs(x, mask=causal), rtol=0, atol=1e-11)


@pytest.mark.parametrize("need", [False, True])
def test_autocast_gives_what_torch_gives(need):
    ours, theirs = twins(torch.float32, batch_first=True)
    x, _, _ = operands(ours, "batch first", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = ours(x, x, x, need_weights=need)[0], theirs(x, x, x, need_weights=need)[0]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_agrees(dtype):
    ours, theirs = twins(dtype, batch_first=True)
    x, _, _ = operands(ours, "batch first", dtype)
    mask = pairs(dtype)["float"]
    for need in (False, True):
        actual, expected = (f(x, x, x, attn_mask=mask, need_weights=need)[0] for f in (ours, theirs))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.15)
