"""All layers, each held to what every module promises: a builder and a call that maps tokens [b, n, 8] to tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

import gradlogz as gz

EMBED_DIM, HEADS = 8, 2


class Layer(NamedTuple):
    """How a layer is made (device and dtype by keyword) and called; what is called is causal."""

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
}
NAMES = list(LAYERS)


def _with_entropy(output: Tensor, heads: gz.Attention) -> Tensor:
    """Statistics take part in what is differentiated."""
    return output + (heads.entropy + heads.log_normalizer).mean(-2).unsqueeze(-1)
