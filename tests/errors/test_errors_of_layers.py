"""The layers say what is wrong with their sizes, tokens and masks."""

import torch
from torch import nn

from gradlogz import GatedHeads, LinkAttention, MixtureAttention, MomentAttention, MultiheadAttention
from support.error_form import each_of, refused

multihead = MultiheadAttention(8, 2, batch_first=True)
moment, full = MomentAttention(8, 2), MomentAttention(8, 2, covariance="full")
mixture, gated, link = MixtureAttention(8, 2), GatedHeads(8, 2), LinkAttention(8, 2, family="poisson")
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
    # moments
    (
        ValueError,
        'MomentAttention: covariance must be "diagonal" or "full"; got \'dense\'.',
        lambda: MomentAttention(8, 2, covariance="dense"),
    ),
    (
        ValueError,
        "MomentAttention: mean must be [*b, tokens, embed_dim=8]; got shape (3, 5, 7).",
        lambda: moment(x[..., :7], x[..., :7]),
    ),
    (
        ValueError,
        "MomentAttention: covariance must be (3, 5, 8), diagonal, beside its mean; got shape (3, 5, 8, 8).",
        lambda: moment(x, torch.diag_embed(x)),
    ),
    (
        ValueError,
        "MomentAttention: covariance of memory must be (3, 6, 8, 8), full, beside its mean; got shape (3, 6, 8).",
        lambda: full(x, torch.diag_embed(x), (y, y)),
    ),
    # mixtures
    (
        ValueError,
        'MixtureAttention: covariance must be "head" or "token"; got \'full\'.',
        lambda: MixtureAttention(8, 2, covariance="full"),
    ),
    (ValueError, "MixtureAttention: rank must be at least 1; got 0.", lambda: MixtureAttention(8, 2, rank=0)),
    (
        ValueError,
        "MixtureAttention: key must be [*b, tokens, embed_dim=8]; got shape (8,).",
        lambda: mixture(x, x[0, 0]),
    ),
    (
        ValueError,
        'MixtureAttention: statistics must be "none" or "scalar"; got \'moments\'.',
        lambda: mixture.attend(x, statistics="moments"),
    ),
    # gates
    (
        ValueError,
        "GatedHeads: gates must be [h] or [*b, h, m] with h=2 heads; got shape (3,).",
        lambda: gated(x, gates=torch.ones(3)),
    ),
    # links
    (
        ValueError,
        "LinkAttention: family must be one of gaussian, poisson, gamma, spins, one_hot, sphere; got 'binomial'.",
        lambda: LinkAttention(8, 2, family="binomial"),
    ),
    (
        ValueError,
        "LinkAttention: a head must have 2 coordinates or more for a sphere; got 1.",
        lambda: LinkAttention(2, 2, family="sphere"),
    ),
    (
        ValueError,
        "LinkAttention: tokens must be nonnegative; got 6 of 6 heads of tokens outside.",
        lambda: link(-torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens must be finite; got 1 of 6 heads of tokens outside.",
        lambda: LinkAttention(8, 2, family="gaussian")(torch.ones(3, 8).put_(torch.tensor(3), torch.tensor(torch.nan))),
    ),
    (
        ValueError,
        "LinkAttention: tokens must be nonnegative; got 6 of 6 heads of tokens outside.",
        lambda: LinkAttention(8, 2, family="gamma")(-torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens must be in [-1, 1]; got 6 of 6 heads of tokens outside.",
        lambda: LinkAttention(8, 2, family="spins")(2 * torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens must be probabilities in each head; got 6 of 6 heads of tokens outside.",
        lambda: LinkAttention(8, 2, family="one_hot")(torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens must be in the unit ball in each head; got 6 of 6 heads of tokens outside.",
        lambda: LinkAttention(8, 2, family="sphere")(torch.ones(3, 8)),
    ),
]


@each_of(ERRORS)
def test_a_layer_refuses(refusal):
    refused(refusal)
