"""Parts of a transformer, by name.

    attention      softmax    W_o concat_h softmax(q k^T / sqrt(d)) v                             MultiheadAttention
                   tied       sum_h c_h W_qh^T softmax(q k^T / sqrt(d)) k,  c_h > 0               TiedAttention: ascent
                   link       queries are natural parameters of tokens tanh(x)                    LinkAttention
                   gated      heads weighted by their log normalisers                             GatedHeads
                   mixture    keys with learned variances                                         MixtureAttention
                   moment     means and variances of tokens                                       MomentAttention
                   linear, sigmoid, cosine    layers of the same names
                   none       0
    contraction    layer_norm, rms_norm     each token separately, with a gain
                   sphere                   x sqrt(d) / |x|, without a gain
                   dyt, derf, hard_clip     g f(a x) + b coordinate by coordinate: f = tanh, erf, clamp to [-1, 1]
                   whitening                C^(-1/2) (x - m), m and C of earlier batches
                   none
    feed-forward   free       W_2 gelu(W_1 x), or relu
                   tied       W^T gelu(W x + b), a gradient                                       HopfieldFeedForward
                   none

Read next: transformer.py, which joins them.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gradlogz._errors import InputValueError
from gradlogz.attention import attend
from gradlogz.attention.layers.cosine import CosineAttention
from gradlogz.attention.layers.gated import GatedHeads
from gradlogz.attention.layers.heads import join, split
from gradlogz.attention.layers.linear import LinearAttention
from gradlogz.attention.layers.link import LinkAttention
from gradlogz.attention.layers.mixture import MixtureAttention
from gradlogz.attention.layers.moment import MomentAttention
from gradlogz.attention.layers.multihead import MultiheadAttention
from gradlogz.attention.layers.sigmoid import SigmoidAttention
from gradlogz.attention.result import Attention
from gradlogz.dynamics import HopfieldFeedForward

AttentionKind = Literal["softmax", "tied", "link", "gated", "mixture", "moment", "linear", "sigmoid", "cosine", "none"]
ContractionKind = Literal["layer_norm", "rms_norm", "dyt", "derf", "sphere", "hard_clip", "whitening", "none"]
FeedForwardKind = Literal["free", "tied", "none"]
Activation = Literal["gelu", "relu"]


# Attention ------------------------------------------------------------------------------------------------------------


class TiedAttention(nn.Module):
    """Attention that ascends its log normaliser: the OV matrix of each head is its transposed QK matrix.

        G_h(x) = log sum_n exp(<W_qh x, W_kh y_n> / sqrt(d))
        output = sqrt(d) sum_h c_h ∇G_h(x) = sum_h c_h W_qh^T softmax(q_h k_h^T / sqrt(d)) k_h,   c_h > 0 learned

    >>> import torch
    >>> layer, x = TiedAttention(8, 2).double(), torch.randn(3, 6, 8, dtype=torch.float64)
    >>> G = lambda y: layer.attend(y, x)[1].log_normalizer.sum()
    >>> torch.allclose(layer(x), 4**0.5 * torch.func.grad(G)(x))
    True
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.log_step = nn.Parameter(torch.zeros(heads))

    def forward(self, tokens: Tensor, *, is_causal: bool = False) -> Tensor:
        """Output [b, n, d]."""
        return self.attend(tokens, tokens, is_causal=is_causal)[0]

    def attend(self, query: Tensor, key: Tensor, *, is_causal: bool = False) -> tuple[Tensor, Attention]:
        """Output, and the statistics of each head [b, h, n]."""
        q, k = split(self.q_proj(query), self.heads), split(self.k_proj(key), self.heads)
        result = attend(q, k, k, is_causal=is_causal, statistics="scalar")
        steps = self.log_step.exp()[:, None, None].to(result.output.dtype)
        return join(steps * result.output) @ self.q_proj.weight, result


class AttentionPart(nn.Module):
    """One attention layer of any kind: update and variance of the tokens from tokens [b, n, d] and their variance.

    The variance is None except for "moment", whose layers carry it beside the residual stream, initially 0.
    """

    def __init__(self, kind: AttentionKind, width: int, heads: int) -> None:
        super().__init__()
        if kind not in BUILDERS:
            remedy = f"Choose one of {', '.join(BUILDERS)}."
            raise InputValueError("AttentionPart", "kind", f"kind {kind!r} is not a known name", remedy)
        self.kind, self.layer = kind, BUILDERS[kind](width, heads)

    def forward(self, tokens: Tensor, variance: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
        """Update of the tokens, and the variance after it."""
        if self.kind == "softmax":
            return self.layer(tokens, tokens, tokens, need_weights=False, is_causal=is_causal)[0], None
        if self.kind == "link":
            return self.layer(tokens.tanh(), is_causal=is_causal), None
        if self.kind == "moment":
            before = torch.zeros_like(tokens) if variance is None else variance
            moments = self.layer(tokens, before, is_causal=is_causal)
            return moments.mean, before + moments.covariance
        if self.kind == "none":
            return torch.zeros_like(tokens), None
        return self.layer(tokens, is_causal=is_causal), None


def fix_maps(layer: MultiheadAttention, identity: str, frozen: str) -> None:
    """Set the maps named by letters of "qkvo" to the identity, and hold them and those named in `frozen`.

    Their gradients become 0, so that an optimizer without weight decay does not change them.
    """
    width = layer.embed_dim
    one, zero = torch.eye(width), torch.zeros(width)
    with torch.no_grad():
        for i, name in enumerate("qkv"):
            if name in identity:
                layer.in_proj_weight[i * width : (i + 1) * width] = one
                layer.in_proj_bias[i * width : (i + 1) * width] = zero
        if "o" in identity:
            layer.out_proj.weight.copy_(one)
            layer.out_proj.bias.copy_(zero)
    held = identity + frozen
    learned = torch.tensor([float(name not in held) for name in "qkv"]).repeat_interleave(width)
    layer.in_proj_weight.register_hook(lambda gradient: gradient * learned.to(gradient).unsqueeze(-1))
    layer.in_proj_bias.register_hook(lambda gradient: gradient * learned.to(gradient))
    layer.out_proj.requires_grad_("o" not in held)


BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax": lambda width, heads: MultiheadAttention(width, heads, batch_first=True),
    "tied": TiedAttention,
    "link": lambda width, heads: LinkAttention(width, heads, family="spins", margin=1e-3, validate=False),
    "gated": GatedHeads,
    "mixture": MixtureAttention,
    "moment": MomentAttention,
    "linear": LinearAttention,
    "sigmoid": SigmoidAttention,
    "cosine": CosineAttention,
    "none": lambda width, heads: nn.Identity(),
}


# Contractions ---------------------------------------------------------------------------------------------------------


class Squashing(nn.Module):
    """g f(a x) + b, coordinate by coordinate, with a bounded f: no statistics of the tokens."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.function = function
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Squashed tokens."""
        return self.gain * self.function(self.slope * tokens) + self.bias


class Sphere(nn.Module):
    """x sqrt(d) / |x|."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of length sqrt(d)."""
        return math.sqrt(tokens.shape[-1]) * nn.functional.normalize(tokens, dim=-1)


class Whitening(nn.Module):
    """C^(-1/2) (x - m), with m and C averaged over the batches before this one.

    Moments of the sequence itself would show later tokens to earlier ones. Gradients do not flow through m and C.
    """

    mean: Tensor
    covariance: Tensor

    def __init__(self, width: int, momentum: float = 0.05, ridge: float = 1e-3) -> None:
        super().__init__()
        self.momentum, self.ridge = momentum, ridge
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("covariance", torch.eye(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Whitened tokens; in training the moments of this batch are averaged into those of the next."""
        values, vectors = torch.linalg.eigh(self.covariance)
        root = (vectors * (values.clamp(min=0.0) + self.ridge).rsqrt()) @ vectors.mT
        whitened = (tokens - self.mean) @ root
        if self.training:
            with torch.no_grad():
                flat = tokens.detach().flatten(0, -2).float()
                mean = flat.mean(0)
                centred = flat - mean
                self.mean.lerp_(mean, self.momentum)
                self.covariance.lerp_(centred.mT @ centred / len(flat), self.momentum)
        return whitened.to(tokens.dtype)


def contraction(kind: ContractionKind, width: int) -> nn.Module:
    """Return a contraction of tokens [..., width] by name."""
    builders: dict[str, Callable[[], nn.Module]] = {
        "layer_norm": lambda: nn.LayerNorm(width),
        "rms_norm": lambda: nn.RMSNorm(width, eps=1e-5),
        "dyt": lambda: Squashing(torch.tanh, width),
        "derf": lambda: Squashing(torch.erf, width),
        "hard_clip": lambda: Squashing(nn.functional.hardtanh, width),
        "sphere": Sphere,
        "whitening": lambda: Whitening(width),
        "none": nn.Identity,
    }
    if kind not in builders:
        remedy = f"Choose one of {', '.join(get_args(ContractionKind))}."
        raise InputValueError("contraction", "kind", f"kind {kind!r} is not a known name", remedy)
    return builders[kind]()


# Feed-forward ---------------------------------------------------------------------------------------------------------


def feed_forward(kind: FeedForwardKind, width: int, hidden: int, activation: Activation = "gelu") -> nn.Module | None:
    """Return a feed-forward layer by name, or None; the activation is that of free layers."""
    if kind == "none":
        return None
    if kind == "free":
        function = nn.GELU() if activation == "gelu" else nn.ReLU()
        return nn.Sequential(nn.Linear(width, hidden), function, nn.Linear(hidden, width))
    if kind == "tied":
        layer = HopfieldFeedForward(width, hidden, activation="gelu")
        with torch.no_grad():  # the second moment of W^T gelu(W x) of the free layer, which has two matrices
            layer.weight.mul_(1 / math.sqrt(3))
        return layer
    remedy = f"Choose one of {', '.join(get_args(FeedForwardKind))}."
    raise InputValueError("feed_forward", "kind", f"kind {kind!r} is not a known name", remedy)
