"""Parameters of an attention layer from which the logits of each head are computed, and how they are scaled.

    separate      W_q, W_k                         q_proj, k_proj and other pairs of names
    fused         rows [q; k; v]                   c_attn, qkv_proj, in_proj_weight
    interleaved   rows [q ... q, k, v] per group   query_key_value
    latent        W_q rows [q^C, q^R] and W_kv rows [k^C, v] per head: MLA, with one rotary key k^R for all heads
    normalised    gains of QK-norms, which undo any scale of the projections

gamma is the factor of the logits of each head; queries and keys are multiplied by sqrt(gamma) each. Key heads that
several query heads share, and gains that all heads share, are multiplied by the least factor of those heads, and so
are their queries. In MLA the rotary query q^R is multiplied by gamma, and k^R is not changed.         [kimi25]

Read next: logit_clipping.py.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..._errors import InputNotImplementedError, InputValueError
from ..._typing import Float, Tensor

SEPARATE = (
    ("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("query_proj", "key_proj"),
    ("to_q", "to_k"), ("wq", "wk"), ("Wq", "Wk"), ("project_q", "project_k"), ("linear_q", "linear_k"),
)  # fmt: skip
FUSED = ("c_attn", "qkv_proj", "qkv", "Wqkv", "in_proj", "to_qkv")
INTERLEAVED = ("query_key_value",)
NORMS = (
    ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"), ("norm_q", "norm_k"),
    ("qk_norm", "qk_norm"),
)  # fmt: skip
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
# Parameters of layers whose logits are not proportional to products of projected queries and keys.
OTHER_TERMS = ("logit_scale", "q_bias", "pos_bias_u", "bias_u", "r_w_bias")
# Classes with rows in another order, or with norms before the projections.
OTHER_ORDERS = ("CodeGen", "BltCross")

LEAVE_OUT = "Leave the layer out of statistics."
NAME_THEM = "Pass projections= with their names, or leave the layer out of statistics."


class Scaling(NamedTuple):
    """A parameter and the factors of its entries, or of those along one dimension; a gain is offset + parameter."""

    parameter: Tensor
    factors: Float[Tensor, " n"]
    dim: int = 0
    offset: float = 0.0

    def apply(self) -> None:
        """Scale the parameter in place; a factor of 1 changes no bit."""
        p = self.parameter
        factors = self.factors.to(p.device, torch.promote_types(p.dtype, torch.float32), non_blocking=True)
        rows = [n if i == self.dim % p.ndim else 1 for i, n in enumerate(p.shape)]
        factors = factors.reshape(rows if len(factors) < p.numel() else p.shape)
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import DTensor, Replicate

            everywhere = [Replicate()] * p.device_mesh.ndim
            factors = DTensor.from_local(factors, p.device_mesh, everywhere, run_check=False)
        p.mul_(factors)
        if self.offset:
            p.add_(self.offset * (factors - 1.0))


class _Projection(NamedTuple):
    """Weight and bias of a linear map; its rows, one for each output, are columns in Conv1D."""

    weight: Tensor
    bias: Tensor | None
    dim: int

    @property
    def rows(self) -> int:
        return self.weight.shape[self.dim]

    def scaled(self, factors: Tensor) -> list[Scaling]:
        bias = [] if self.bias is None else [Scaling(self.bias, factors)]
        return [Scaling(self.weight, factors, self.dim), *bias]


Scaled = tuple[Float[Tensor, " h"], list[Scaling]]


def scalings(
    name: str, module: nn.Module, gamma: Float[Tensor, " h"], projections: str | tuple[str, str] | None
) -> Scaled:
    """Factors of the heads of a layer, the least of each group, and scalings that multiply the logits by them."""
    layer = _Layer(name, module, len(gamma))
    if type(module).__name__.startswith(OTHER_ORDERS) or any(hasattr(module, term) for term in OTHER_TERMS):
        problem = f"model has logits in {layer} that are not products of its projections alone"
        raise InputNotImplementedError("qk_clip", "model", problem, LEAVE_OUT)
    if projections is None and isinstance(module, nn.MultiheadAttention):
        return _of_torch(layer, gamma)
    if projections is None and hasattr(module, "kv_b_proj"):
        return _latent(layer, gamma)
    if projections is None:
        names = next((pair for pair in SEPARATE if layer.has(pair[0]) and layer.has(pair[1])), None)
        projections = names or next((name for name in (*FUSED, *INTERLEAVED) if layer.has(name)), None)
    if projections is None:
        problem = f"model must have query and key projections in {layer}, got {', '.join(module._modules) or 'none'}"
        raise InputNotImplementedError("qk_clip", "projections", problem, NAME_THEM)
    for pair in NORMS:
        norms = [getattr(module, name, None) for name in pair]
        if any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms):
            return _normalised(layer, gamma, norms, projections)
    if isinstance(projections, str):
        return _fused(layer, gamma, projections)
    return _separate(layer, gamma, *projections)


def _separate(layer: "_Layer", gamma: Tensor, query: str, key: str) -> Scaled:
    q, k = layer.projection(query), layer.projection(key)
    d = layer.rows_per_head(q.rows, layer.heads)
    gamma, r, r_k = layer.factors(gamma, k.rows // d)
    return gamma, [*q.scaled(r.repeat_interleave(d)), *k.scaled(r_k.repeat_interleave(d))]


def _fused(layer: "_Layer", gamma: Tensor, name: str) -> Scaled:
    qkv, groups = layer.projection(name), layer.key_heads()
    d = layer.rows_per_head(qkv.rows, layer.heads + 2 * groups)
    gamma, r, r_k = layer.factors(gamma, groups)
    rows = torch.cat((r, r_k, torch.ones_like(r_k)))
    if name in INTERLEAVED or type(layer.module).__name__.startswith("GPTBigCode"):
        rows = torch.cat([part.unflatten(0, (groups, -1)) for part in (r, r_k, torch.ones_like(r_k))], 1).flatten()
    return gamma, qkv.scaled(rows.repeat_interleave(d))


def _latent(layer: "_Layer", gamma: Tensor) -> Scaled:
    nope, rope, value = (getattr(layer.module, f"{part}_head_dim", 0) for part in ("qk_nope", "qk_rope", "v"))
    q = layer.projection("q_proj" if getattr(layer.module, "q_b_proj", None) is None else "q_b_proj")
    kv = layer.projection("kv_b_proj")
    layer.check(q.rows, layer.heads * (nope + rope))
    layer.check(kv.rows, layer.heads * (nope + value))
    r = gamma.sqrt().unsqueeze(1).expand(-1, nope)
    q_rows = torch.cat((r, gamma.unsqueeze(1).expand(-1, rope)), 1).flatten()
    kv_rows = torch.cat((r, r.new_ones(layer.heads, value)), 1).flatten()
    return gamma, [*q.scaled(q_rows), *kv.scaled(kv_rows)]


def _of_torch(layer: "_Layer", gamma: Tensor) -> Scaled:
    m: Any = layer.module
    r = gamma.sqrt().repeat_interleave(layer.rows_per_head(m.embed_dim, layer.heads))
    rows = torch.cat((r, r, torch.ones_like(r)))
    if m.in_proj_weight is None:
        scaled = [Scaling(m.q_proj_weight, r), Scaling(m.k_proj_weight, r)]
    else:
        scaled = [Scaling(m.in_proj_weight, rows)]
    more = [Scaling(p, f, -1) for p, f in ((m.in_proj_bias, rows), (m.bias_k, r)) if p is not None]
    return gamma, scaled + more


def _normalised(layer: "_Layer", gamma: Tensor, norms: list[Any], projections: str | tuple[str, str]) -> Scaled:
    groups = layer.key_heads()
    if any(getattr(norm, "weight", None) is None for norm in norms) or norms[0] is norms[1]:
        problem = f"model must have gains in the norms of queries and keys of {layer}, which undo any other scale"
        raise InputNotImplementedError("qk_clip", "model", problem, LEAVE_OUT)
    if isinstance(projections, str):
        d = layer.head_size() or layer.projection(projections).rows // (layer.heads + 2 * groups)
    else:
        d = layer.head_size() or layer.projection(projections[0]).rows // layer.heads
    shared = any(norm.weight.numel() == d for norm in norms)
    gamma, *_ = layer.factors(gamma, 1 if shared else groups)
    scaled = []
    for norm, heads in zip(norms, (layer.heads, groups), strict=True):
        gain, bias = norm.weight, getattr(norm, "bias", None)
        layer.check(gain.numel(), d if gain.numel() == d else heads * d)
        r = gamma[:: layer.heads // heads].sqrt().repeat_interleave(d)[: gain.numel()]
        scaled.append(Scaling(gain, r, offset=_offset(norm)))
        scaled += [] if bias is None else [Scaling(bias, r)]
    return gamma, scaled


class _Layer(NamedTuple):
    """An attention layer with a number of query heads."""

    name: str
    module: nn.Module
    heads: int

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__})"

    def has(self, name: str) -> bool:
        """Return whether a linear map of this name has a floating-point weight of its own."""
        projection = getattr(self.module, name, None)
        weight = projection._parameters.get("weight") if isinstance(projection, nn.Module) else None
        return weight is not None and weight.ndim == 2 and weight.is_floating_point()

    def projection(self, name: str) -> _Projection:
        if not self.has(name):
            problem = f"model must have a linear projection {name} with a weight of its own in {self}"
            raise InputValueError("qk_clip", "projections", problem, NAME_THEM)
        linear = getattr(self.module, name)
        return _Projection(linear.weight, linear.bias, 1 if type(linear).__name__ == "Conv1D" else 0)

    def key_heads(self) -> int:
        places = [(place, name) for place in (self.module, getattr(self.module, "config", None)) for name in KEY_HEADS]
        numbers = [getattr(place, name, None) for place, name in places]
        return next((number for number in numbers if isinstance(number, int)), self.heads)

    def head_size(self) -> int | None:
        """Size of a head, if it is an attribute of the layer."""
        sizes = [getattr(self.module, name, None) for name in HEAD_SIZES]
        return next((size for size in sizes if isinstance(size, int)), None)

    def rows_per_head(self, rows: int, heads: int) -> int:
        """Rows of a projection divided by its heads."""
        size = self.head_size() or rows // heads
        self.check(rows, size * heads)
        return size

    def factors(self, gamma: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Least factor of each group of heads, for each of its heads; its root for query heads and for key heads."""
        if groups == 0 or self.heads % groups:
            problem = f"statistics must have a multiple of {groups} heads for {self}, got {self.heads}"
            raise InputValueError(
                "qk_clip", "statistics", problem, "Pass the largest logits of all heads of the layer."
            )
        least = gamma.unflatten(0, (groups, -1)).amin(1)
        gamma = least.repeat_interleave(self.heads // groups)
        return gamma, gamma.sqrt(), least.sqrt()

    def check(self, rows: int, expected: int) -> None:
        if rows != expected or rows == 0:
            problem = f"statistics must have all heads of {self}: {self.heads} heads need {expected} rows, not {rows}"
            raise InputValueError(
                "qk_clip", "statistics", problem, "Pass the largest logits of all heads of the layer."
            )


def _offset(norm: nn.Module) -> float:
    """1 if the norm multiplies by 1 + weight, as in Gemma, else 0: its output for weight 0 tells."""
    if norm not in _OFFSETS:
        zeros = {name: torch.zeros_like(p, device="cpu") for name, p in norm.named_parameters()}
        weight = zeros["weight"]
        x = torch.arange(1.0, 1.0 + weight.numel(), dtype=weight.dtype).reshape(weight.shape)
        _OFFSETS[norm] = float(torch.func.functional_call(norm, zeros, (x,)).any())
    return _OFFSETS[norm]


_OFFSETS: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
