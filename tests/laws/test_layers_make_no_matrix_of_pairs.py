"""Layers of linear memory: with 4096 tokens nothing of the size of queries times keys is made, forward or backward."""

import pytest
import torch

import gradlogz as gz
from gradlogz.attention import CosineAttention, LinearAttention, SigmoidAttention

TOKENS, SIZE, HEADS = 4096, 32, 2
LAYERS = {
    "multihead": (
        lambda: gz.MultiheadAttention(SIZE, HEADS, batch_first=True),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    ),
    "moment": (lambda: gz.MomentAttention(SIZE, HEADS), lambda layer, x: sum(layer(x, x.square()))),
    "mixture": (lambda: gz.MixtureAttention(SIZE, HEADS), lambda layer, x: layer(x)),
    "gated": (lambda: gz.GatedHeads(SIZE, HEADS), lambda layer, x: layer(x)),
    "link": (lambda: gz.LinkAttention(SIZE, HEADS, family="spins"), lambda layer, x: layer(x.tanh())),
    "linear": (lambda: LinearAttention(SIZE, HEADS), lambda layer, x: layer(x, is_causal=True)),
    "sigmoid": (lambda: SigmoidAttention(SIZE, HEADS), lambda layer, x: layer(x, is_causal=True)),
    "cosine": (lambda: CosineAttention(SIZE, HEADS), lambda layer, x: layer(x)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_matrix_of_pairs_is_made(name):
    build, call = LAYERS[name]
    layer, x = build(), torch.randn(1, TOKENS, SIZE, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.autograd.grad(call(layer, x).sum(), x)
    largest = max(event.cpu_memory_usage for event in profile.events() if event.name.startswith("aten::empty"))
    assert 4 * x.numel() <= largest < TOKENS**2  # bytes: a quarter of one head's weights
