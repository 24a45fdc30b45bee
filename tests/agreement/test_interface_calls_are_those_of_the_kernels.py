"""What Hugging Face layers hand to the flash kernels and to flex_attention is read as those read it.

Against the softmax of the logits with a mask that is written out; flex_attention itself computes where it can.
"""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gradlogz.attention.in_models.intercepted_calls import call_from_interface
from support.scales import close

F64 = torch.float64


def tensors(m, n, heads=(4, 2), batch=2):
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads[0], m), (heads[1], n), (heads[1], n))
    return [torch.randn(batch, *size, 8, generator=generator, dtype=F64) for size in sizes]


def defined(q, k, v, mask, scale=8**-0.5, softcap=None, sinks=None):
    """(output, log normaliser, entropy) with the weights written out; rows without a key are 0."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = q @ k.mT * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks[:, None, None].expand(*s.shape[:3], 1)), -1)
    G = s.logsumexp(-1)
    p = torch.where(G.unsqueeze(-1) > -torch.inf, (s - G.unsqueeze(-1)).exp(), 0.0)
    return p[..., : k.shape[2]] @ v, G, -torch.special.xlogy(p, p).sum(-1)


def agree(call, expected):
    found = call.attend()
    for actual, value in zip((found.output, found.log_normalizer, found.entropy), expected, strict=True):
        close(actual, value)


def layer(is_causal):
    module = nn.Module()
    module.is_causal = is_causal
    return module


def positions(m, n):
    """Queries are the last of the keys."""
    return torch.arange(n - m, n)[:, None], torch.arange(n)[None]


PADDED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
FLASH = {
    "causal": (7, True, {}, lambda i, j: j <= i),
    "both ways": (7, False, {}, lambda i, j: j > -1),
    "decoding": (1, True, {}, lambda i, j: j <= i),
    "some tokens after a cache": (3, True, {}, lambda i, j: j <= i),
    "the call overrules the layer": (7, True, {"is_causal": False}, lambda i, j: j > -1),
    "a sliding window": (7, True, {"sliding_window": 3}, lambda i, j: (j <= i) & (j > i - 3)),
    "a window both ways": (7, False, {"sliding_window": 3}, lambda i, j: (j - i).abs() < 3),
    "padding": (7, True, {"attention_mask": PADDED}, lambda i, j: (j <= i) & PADDED.bool()[:, None, None]),
    "padding on the left": (
        7, True, {"attention_mask": PADDED.flip(1)}, lambda i, j: (j <= i) & PADDED.flip(1).bool()[:, None, None],
    ),
    "padding of a longer cache": (
        7, True, {"attention_mask": torch.cat((torch.ones(2, 3), PADDED), 1)},
        lambda i, j: (j <= i) & PADDED.bool()[:, None, None],
    ),
    "other keys": (4, False, {"attention_mask": PADDED}, lambda i, j: (j > -1) & PADDED.bool()[:, None, None]),
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
@pytest.mark.parametrize("name", FLASH)
def test_flash_kernels(name, implementation):
    m, causal, given, sees = FLASH[name]
    q, k, v = tensors(m, 7)
    mask = sees(*positions(m, 7)).expand(2, 4, m, 7)
    call = call_from_interface(implementation, layer(causal), q, k, v, given.get("attention_mask"),
                        **{name: value for name, value in given.items() if name != "attention_mask"})  # fmt: skip
    agree(call, defined(q, k, v, mask))


def test_flash_kernels_with_sinks_a_soft_cap_and_a_scale():
    q, k, v = tensors(7, 7)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=F64)
    i, j = positions(7, 7)
    call = call_from_interface("flash_attention_2", layer(True), q, k, v, None, scaling=0.9, softcap=0.7, s_aux=sinks)
    agree(call, defined(q, k, v, (j <= i).expand(2, 4, 7, 7), 0.9, 0.7, sinks))


PACKED = {
    "where sequences begin": {
        "cu_seq_lens_q": torch.tensor([0, 3, 4, 7]), "cu_seq_lens_k": torch.tensor([0, 3, 4, 7]),
        "max_length_q": 3, "max_length_k": 3,
    },
    "positions that begin again": {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2]])},
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("causal", [True, False])
def test_flash_kernels_with_packed_sequences(name, causal):
    q, k, v = tensors(7, 7, batch=1)
    document = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    i, j = positions(7, 7)
    mask = (document[i] == document[j]) & ((j <= i) | (not causal))
    call = call_from_interface("flash_attention_2", layer(causal), q, k, v, None, **PACKED[name])
    agree(call, defined(q, k, v, mask.expand(1, 4, 7, 7)))


def test_positions_of_one_sequence_pack_nothing():
    q, k, v = tensors(7, 7, batch=1)
    i, j = positions(7, 7)
    for ids in (torch.arange(7)[None], torch.arange(5, 12)[None]):
        call = call_from_interface("flash_attention_2", layer(True), q, k, v, None, position_ids=ids)
        agree(call, defined(q, k, v, (j <= i).expand(1, 4, 7, 7)))


FLEX = {
    "causal": (7, lambda b, h, i, j: j <= i),
    "a window of the past": (7, lambda b, h, i, j: (j <= i) & (i - j < 3)),
    "padding": (7, lambda b, h, i, j: (j <= i) & (PADDED[b, j] > 0)),
    "after a cache": (3, lambda b, h, i, j: j <= i + 4),
    "each head its own": (7, lambda b, h, i, j: (j <= i) & (i - j <= h)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name):
    m, sees = FLEX[name]
    q, k, v = tensors(m, 7)
    blocks = create_block_mask(sees, 2, 4 if name == "each head its own" else None, m, 7, device="cpu")
    index = torch.meshgrid(*map(torch.arange, (2, 4, m, 7)), indexing="ij")
    # Whether a layer is causal is said by the block mask alone.
    call = call_from_interface("flex_attention", layer(True), q, k, v, blocks)
    agree(call, defined(q, k, v, sees(*index)))
    theirs = flex_attention(*(t.float() for t in (q, k, v)), block_mask=blocks, enable_gqa=True)
    torch.testing.assert_close(call.attend().output.float(), theirs, rtol=1e-5, atol=1e-5)


def test_flex_attention_without_a_mask_sees_all():
    q, k, v = tensors(7, 7)
    agree(call_from_interface("flex_attention", layer(True), q, k, v, None), defined(q, k, v, torch.ones(7, 7).bool()))


def test_flex_attention_with_an_added_mask():
    q, k, v = tensors(7, 7)
    i, j = positions(7, 7)
    mask = torch.zeros(7, 7, dtype=F64).masked_fill(j > i, torch.finfo(F64).min).expand(2, 1, 7, 7)
    agree(call_from_interface("flex_attention", layer(True), q, k, v, mask), defined(q, k, v, j <= i))
