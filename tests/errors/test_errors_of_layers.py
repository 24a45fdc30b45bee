"""The layers say what is wrong with their sizes, tokens and masks."""

import torch
from form import each_of, refused
from torch import nn

from gradlogz import MultiheadAttention

multihead = MultiheadAttention(8, 2, batch_first=True)
x, y = torch.randn(3, 5, 8), torch.randn(3, 6, 8)

ERRORS = [
    (
        ValueError,
        "MultiheadAttention: embed_dim must be a positive multiple of num_heads; got embed_dim=8 and num_heads=3.",
        lambda: MultiheadAttention(8, 3),
    ),
    (
        TypeError,
        "MultiheadAttention.from_torch: module must be a torch.nn.MultiheadAttention; got Linear.",
        lambda: MultiheadAttention.from_torch(nn.Linear(2, 2)),
    ),
    (
        ValueError,
        "MultiheadAttention: query, key and value must be [b, tokens, size] or [tokens, size], all three alike; got "
        "query (3, 5, 8), key (5, 8), value (5, 8).",
        lambda: multihead(x, x[0], x[0]),
    ),
    (
        ValueError,
        "MultiheadAttention: query, key and value must end in (8, 8, 8); got query (3, 5, 8), key (3, 5, 7), "
        "value (3, 5, 8).",
        lambda: multihead(x, x[..., :7], x),
    ),
    (
        ValueError,
        "MultiheadAttention: value must have a token for each key, and all three one batch size; got "
        "query (3, 5, 8), key (3, 5, 8), value (3, 6, 8).",
        lambda: multihead(x, x, y),
    ),
    (
        ValueError,
        "MultiheadAttention: value must have a token for each key, and all three one batch size; got "
        "query (3, 5, 8), key (2, 5, 8), value (2, 5, 8).",
        lambda: multihead(x, x[:2], x[:2]),
    ),
    (
        TypeError,
        "MultiheadAttention: attn_mask must be bool or floating; got torch.int64.",
        lambda: multihead(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.int64)),
    ),
    (
        ValueError,
        "MultiheadAttention: attn_mask must have shape (5, 6) or (6, 5, 6); got shape (3, 5, 6).",
        lambda: multihead(x, y, y, attn_mask=torch.zeros(3, 5, 6)),
    ),
    (
        ValueError,
        "MultiheadAttention: key_padding_mask must have shape (3, 6); got shape (3, 5).",
        lambda: multihead(x, y, y, torch.zeros(3, 5, dtype=torch.bool)),
    ),
    (
        ValueError,
        "MultiheadAttention: is_causal must come with attn_mask, or with as many queries as keys; got 5 queries and "
        "6 keys.",
        lambda: multihead.attend(x, y, y, is_causal=True),
    ),
]


@each_of(ERRORS)
def test_a_layer_refuses(refusal):
    refused(refusal)
