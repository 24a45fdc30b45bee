"""The layers say what is wrong with their sizes, tokens and masks."""

import torch
from torch import nn

from gradlogz import GatedHeads, LinkAttention, MixtureAttention, MomentAttention, MultiheadAttention
from gradlogz.attention import CosineAttention, LinearAttention, SigmoidAttention, linear_attend, sigmoid_attend
from support.error_form import each_of, refused

multihead = MultiheadAttention(8, 2, batch_first=True)
moment, full = MomentAttention(8, 2), MomentAttention(8, 2, covariance="full")
mixture, gated, link = MixtureAttention(8, 2), GatedHeads(8, 2), LinkAttention(8, 2, family="poisson")
x, y = torch.randn(3, 5, 8), torch.randn(3, 6, 8)

ERRORS = [
    (
        ValueError,
        "MultiheadAttention: embed_dim",
        "num_heads",
        lambda: MultiheadAttention(8, 3),
    ),
    (
        TypeError,
        "MultiheadAttention.from_torch: module",
        "a torch.nn.MultiheadAttention",
        lambda: MultiheadAttention.from_torch(nn.Linear(2, 2)),
    ),
    (
        ValueError,
        "MultiheadAttention: value",
        "tokens",
        lambda: multihead(x, x[0], x[0]),
    ),
    (
        ValueError,
        "MultiheadAttention: value",
        "end",
        lambda: multihead(x, x[..., :7], x),
    ),
    (
        ValueError,
        "MultiheadAttention: value",
        "token",
        lambda: multihead(x, x, y),
    ),
    (
        ValueError,
        "MultiheadAttention: value",
        "token",
        lambda: multihead(x, x[:2], x[:2]),
    ),
    (
        TypeError,
        "MultiheadAttention: attn_mask",
        "floating",
        lambda: multihead(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.int64)),
    ),
    (
        ValueError,
        "MultiheadAttention: attn_mask",
        "shape",
        lambda: multihead(x, y, y, attn_mask=torch.zeros(3, 5, 6)),
    ),
    (
        ValueError,
        "MultiheadAttention: key_padding_mask",
        "shape",
        lambda: multihead(x, y, y, torch.zeros(3, 5, dtype=torch.bool)),
    ),
    (
        ValueError,
        "MultiheadAttention: is_causal",
        "attn_mask",
        lambda: multihead.attend(x, y, y, is_causal=True),
    ),
    # linear, sigmoid and cosine attention
    (TypeError, "linear_attend: value", "dtype", lambda: linear_attend(x, x, x.double())),
    (TypeError, "sigmoid_attend: key", "tokens", lambda: sigmoid_attend(x, x[0, 0], x)),
    (ValueError, "linear_attend: key", "[*b,", lambda: linear_attend(x, x[..., :7], x)),
    (ValueError, "sigmoid_attend: key", "[*b,", lambda: sigmoid_attend(x, x[:2], x)),
    (ValueError, "sigmoid_attend: value", "token", lambda: sigmoid_attend(x, x, y)),
    (ValueError, "linear_attend: feature_map", "identity", lambda: linear_attend(x, x, x, feature_map="cosine")),
    (
        TypeError,
        "linear_attend: attn_mask",
        "bool",
        lambda: linear_attend(x, x, x, attn_mask=torch.zeros(5, 5)),
    ),
    (ValueError, "linear_attend: scale", "positive", lambda: linear_attend(x, x, x, scale=-1.0)),
    (
        ValueError,
        "linear_attend: state",
        "memory",
        lambda: linear_attend(x, x, x[..., :3], state=linear_attend(x, x, x).state),
    ),
    (ValueError, "linear_attend: statistics", "scalar", lambda: linear_attend(x, x, x, statistics="moments")),
    (
        ValueError,
        "linear_attend: state",
        "mass",
        lambda: linear_attend(x, x, x, state=linear_attend(x, x, x, feature_map="identity").state),
    ),
    (ValueError, "sigmoid_attend: statistics", "scalar", lambda: sigmoid_attend(x, x, x, statistics="moments")),
    (ValueError, "LinearAttention: embed_dim", "num_heads", lambda: LinearAttention(8, 3)),
    (ValueError, "SigmoidAttention: key", "embed_dim", lambda: SigmoidAttention(8, 2)(x, x[0, 0])),
    (ValueError, "CosineAttention: beta", "largest", lambda: CosineAttention(8, 2, beta=200.0)),
    # moments
    (
        ValueError,
        "MomentAttention: covariance",
        "diagonal",
        lambda: MomentAttention(8, 2, covariance="dense"),
    ),
    (
        ValueError,
        "MomentAttention: mean",
        "embed_dim",
        lambda: moment(x[..., :7], x[..., :7]),
    ),
    (
        ValueError,
        "MomentAttention: covariance",
        "diagonal",
        lambda: moment(x, torch.diag_embed(x)),
    ),
    (
        ValueError,
        "MomentAttention: covariance of memory",
        "matching",
        lambda: full(x, torch.diag_embed(x), (y, y)),
    ),
    # mixtures
    (
        ValueError,
        "MixtureAttention: covariance",
        "token",
        lambda: MixtureAttention(8, 2, covariance="full"),
    ),
    (ValueError, "MixtureAttention: rank", "least", lambda: MixtureAttention(8, 2, rank=0)),
    (
        ValueError,
        "MixtureAttention: key",
        "embed_dim",
        lambda: mixture(x, x[0, 0]),
    ),
    (
        ValueError,
        "MixtureAttention: statistics",
        "scalar",
        lambda: mixture.attend(x, statistics="moments"),
    ),
    # gates
    (
        ValueError,
        "GatedHeads: gates",
        "heads",
        lambda: gated(x, gates=torch.ones(3)),
    ),
    # links
    (
        ValueError,
        "LinkAttention: family",
        "gaussian",
        lambda: LinkAttention(8, 2, family="binomial"),
    ),
    (
        ValueError,
        "LinkAttention: embed_dim",
        "coordinates",
        lambda: LinkAttention(2, 2, family="sphere"),
    ),
    (
        ValueError,
        "LinkAttention: tokens",
        "nonnegative",
        lambda: link(-torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens",
        "finite",
        lambda: LinkAttention(8, 2, family="gaussian")(torch.ones(3, 8).put_(torch.tensor(3), torch.tensor(torch.nan))),
    ),
    (
        ValueError,
        "LinkAttention: tokens",
        "nonnegative",
        lambda: LinkAttention(8, 2, family="gamma")(-torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens",
        "in",
        lambda: LinkAttention(8, 2, family="spins")(2 * torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens",
        "probabilities",
        lambda: LinkAttention(8, 2, family="one_hot")(torch.ones(3, 8)),
    ),
    (
        ValueError,
        "LinkAttention: tokens",
        "unit",
        lambda: LinkAttention(8, 2, family="sphere")(torch.ones(3, 8)),
    ),
]


@each_of(ERRORS)
def test_a_layer_refuses(refusal):
    refused(refusal)
