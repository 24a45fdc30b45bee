"""All layers, for tests of properties that every module has: a builder, and a call on tokens [b, n, 8]."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import gradlogz as gz
from gradlogz import attention as at

EMBED_DIM, HEADS = 8, 2


class Layer(NamedTuple):
    """Constructor of a layer (with keywords device and dtype), and a causal call of it."""

    build: Callable[..., nn.Module]
    call: Callable[[Any, Tensor], Tensor]


LAYERS = {
    "multihead": Layer(
        lambda **o: gz.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, **o),
        lambda layer, x: layer(x, x, x, need_weights=False, is_causal=True)[0],
    ),
    "multihead, with weights": Layer(
        lambda **o: gz.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, add_bias_kv=True, **o),
        lambda layer, x: layer(x, x, x, is_causal=True)[0],
    ),
    "multihead, with statistics": Layer(
        lambda **o: gz.MultiheadAttention(EMBED_DIM, HEADS, batch_first=True, **o),
        lambda layer, x: _with_entropy(*layer.attend(x, x, x, is_causal=True)),
    ),
    **{
        f"moment, {kind}": Layer(
            lambda kind=kind, **o: gz.MomentAttention(EMBED_DIM, HEADS, covariance=kind, **o),
            lambda layer, x: _both(layer(x, _covariance(layer, x), is_causal=True)),
        )
        for kind in ("diagonal", "full")
    },
    **{
        f"mixture, of a {kind}, {'diagonal' if rank is None else 'low rank'}": Layer(
            lambda kind=kind, rank=rank, **o: gz.MixtureAttention(EMBED_DIM, HEADS, covariance=kind, rank=rank, **o),
            lambda layer, x: _with_entropy(*layer.attend(x, is_causal=True)),
        )
        for kind in ("head", "token")
        for rank in (None, 2)
    },
    **{
        f"gated, {'tied' if tied else 'free'}": Layer(
            lambda tied=tied, **o: gz.GatedHeads(EMBED_DIM, HEADS, tied=tied, **o),
            lambda layer, x: _with_gap(*layer.attend(x, is_causal=True)),
        )
        for tied in (False, True)
    },
    **{
        f"link, {family}": Layer(
            lambda family=family, **o: gz.LinkAttention(EMBED_DIM, HEADS, family=family, **o),
            lambda layer, x, into=into: layer(into(x), is_causal=True),
        )
        for family, into in {
            "gaussian": lambda x: x,
            "poisson": softplus,
            "gamma": lambda x: softplus(x) + 0.5,
            "spins": torch.tanh,
            "one_hot": lambda x: x.unflatten(-1, (HEADS, -1)).softmax(-1).flatten(-2),
            "sphere": lambda x: 0.3 * torch.tanh(x),
        }.items()
    },
    "link, without projections": Layer(
        lambda **o: gz.LinkAttention(EMBED_DIM, HEADS, family="spins", project=False, **o),
        lambda layer, x: layer(torch.tanh(x), is_causal=True),
    ),
    **{
        f"linear, {features}": Layer(
            lambda features=features, **o: at.LinearAttention(EMBED_DIM, HEADS, feature_map=features, **o),
            lambda layer, x: _with_log_normalizer(*layer.attend(x, is_causal=True)),
        )
        for features in ("elu", "identity")
    },
    "sigmoid": Layer(
        lambda **o: at.SigmoidAttention(EMBED_DIM, HEADS, **o),
        lambda layer, x: _with_entropy(*layer.attend(x, is_causal=True)),
    ),
    "cosine": Layer(
        lambda **o: at.CosineAttention(EMBED_DIM, HEADS, beta=3.0, **o),
        lambda layer, x: _with_entropy(*layer.attend(x, is_causal=True)),
    ),
}
NAMES = list(LAYERS)


def _with_log_normalizer(output: Tensor, heads: at.LinearAttended) -> Tensor:
    return output + heads.log_normalizer.mean(-2).unsqueeze(-1)


def _with_entropy(output: Tensor, heads: at.Attention | at.SigmoidAttended) -> Tensor:
    """Add statistics of the heads to the output, so that gradients pass through them."""
    return output + (heads.entropy + heads.log_normalizer).mean(-2).unsqueeze(-1)


def _covariance(layer: gz.MomentAttention, x: Tensor) -> Tensor:
    variance = 0.1 + x.square() / 4
    return variance if layer.covariance == "diagonal" else torch.diag_embed(variance)


def _both(moments: tuple[Tensor, Tensor]) -> Tensor:
    mean, covariance = moments
    variance = covariance if covariance.ndim == mean.ndim else covariance.sum(-1)
    return mean + variance


def _with_gap(output: Tensor, gated: Any) -> Tensor:
    return output + (gated.gap + gated.log_normalizer).unsqueeze(-1)
