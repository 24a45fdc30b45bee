"""An attention call inside a model, converted to the arguments of `attend`.

    call_from_interface   arguments of a Hugging Face attention function     masks in the form of each implementation
    call_from_sdpa        a call of torch's scaled_dot_product_attention     causal from the upper left
    Logits                the input of a softmax inside a layer              after scale, bias and mask

Hugging Face: `scaling` is the scale, not always 1 / sqrt(d); `s_aux` are sinks; `position_bias` is a bias; a sliding
window of W is (W - 1, 0). Where a call does not set `is_causal`, the attribute of the layer decides.

Read next: interception.py (how calls are intercepted), ../functional.py (attend).
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputNotImplementedError, InputTypeError
from ..._typing import Float, Tensor
from ...kernels.attention.scoring import Scoring, Sight
from ...kernels.optional import kernel_module
from .. import masks
from ..functional import attend
from ..result import Attention
from .first_keys import (
    SinkWeights,
    first_of_segments,
    learned_weight,
    uniform_weight,
    uniform_weight_of_a_band,
    weight_on_key,
)
from .hidden_keys import KeyVisibility, hidden, visible_by_logits, visible_by_masks

# Name of the attention implementation of transformers that calls `attend`.
NAME = "gradlogz"

# The smallest number of values that the GPU kernels take, and the largest size of a head that head_sums_gpu.py takes.
WIDTH, LARGEST_HEAD = 16, 256

# Attribute names of layers for their number of heads.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")


class _Memory:
    """A tensor that equals others with the same numbers in the same memory; it is kept, so that no other takes it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        version = 0 if tensor.is_inference() else tensor._version  # inference tensors cannot be changed here
        place = tensor.data_ptr() or id(tensor)  # a tensor made of others, as a DTensor, has no memory of its own
        self._identity = place, tensor.shape, tensor.stride(), tensor.dtype, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Memory) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


class Call(NamedTuple):
    """Query, key and value [b, h, tokens, size], and the options for which `attend` computes the same attention.

    `mask_sources` are the tensors of the model from which the masks among the options were made for this call alone;
    None if the masks are the model's own.
    """

    query: Float[Tensor, "b h m d"]
    key: Float[Tensor, "b hk n d"]
    value: Float[Tensor, "b hk n v"]
    options: dict[str, Any]
    requested: str = "none"
    mask_sources: tuple[Tensor | None, ...] | None = None

    def attend(self, statistics: str = "scalar") -> Attention:
        """Compute this call by `attend`, with these statistics or those that the call requested, whichever are more."""
        most = max(statistics, self.requested, key=("none", "scalar", "moments").index)
        return attend(self.query, self.key, self.value, statistics=most, **self.options)  # type: ignore[arg-type]

    def weights(self) -> Tensor:
        """Attention weights [b, h, m, n] before dropout: the output for values that are the unit vectors."""
        n = self.key.shape[-2]
        units = torch.eye(n, dtype=self.value.dtype, device=self.value.device).expand(*self.key.shape[:-1], n)
        return attend(self.query, self.key, units, statistics="none", **{**self.options, "dropout_p": 0.0}).output

    def shows_its_statistics(self) -> bool:
        """Return whether the result of this call has what a monitor reads.

        Without statistics another kernel may compute the output, with other last bits.
        """
        return self.requested != "none"

    def every_row_sees_a_key(self) -> bool:
        """Return whether every row certainly sees a key."""
        if self.options.keys() & {"attn_mask", "bias", "segments"}:
            return False
        left, right = masks.band(bool(self.options.get("is_causal")), self.options.get("window"))
        if left is right is None:
            return True
        sees_itself = all(reach is None or reach >= 0 for reach in (left, right))
        return sees_itself and self.query.shape[-2] <= self.key.shape[-2]

    def statistics(self) -> Attention:
        """Statistics of every row, computed separately: without a gradient, without dropout, with narrow values."""
        q, k = self.query.detach(), self.key.detach()
        options: dict[str, Any] = {k: v.detach() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        options["dropout_p"] = 0.0
        return attend(q, k, k[..., :WIDTH], **options)

    def sight(self) -> tuple[Any, ...]:
        """Masks, segments, band and sizes, which layers may share; equal if what a row sees is equal."""
        options, q, k = self.options, self.query, self.key
        sources = self.mask_sources
        if sources is None:
            sources = tuple(options.get(name) for name in ("attn_mask", "bias", "segments"))
        band = masks.band(bool(options.get("is_causal")), options.get("window"))
        sizes = q.ndim, len(q), len(k), q.shape[-2], k.shape[-2]
        return *(None if t is None else _Memory(t) for t in sources), band, sizes, q.device

    def visible_keys(self) -> KeyVisibility:
        """Keys that the rows see, by masks, segments and band: without queries, keys and values."""
        segments, (m, n) = self.options.get("segments"), (self.query.shape[-2], self.key.shape[-2])
        band = masks.band(bool(self.options.get("is_causal")), self.options.get("window"))
        visible = visible_by_masks((self.options.get("attn_mask"), self.options.get("bias")), self.query, self.key)
        packed = position = None
        if segments is not None and self.query.ndim == 4:
            packed = segments.reshape(-1, n).expand(max(len(self.query), len(self.key)), -1)
            position = first_of_segments(packed, m)
        elif visible is not None:
            position = _first(visible)
        if packed is position is visible is None:
            uniform = uniform_weight_of_a_band((m, n), band, self.query.device)
        else:
            uniform = uniform_weight((m, n), band, packed, position, visible, self.query.device)
        return KeyVisibility.of(visible, position, uniform)

    def sink_weights(self, log_normalizer: Tensor, keys: KeyVisibility) -> SinkWeights:
        """Weights of every row on the first visible key of its sequence or document, and on the learned sink."""
        q, k, G = self.query.detach(), self.key.detach(), log_normalizer.detach()
        if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:  # as `attend` does
            q, k = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k))
        first = weight_on_key(q, k, G, keys.position, self.options)
        assert keys.uniform is not None
        return SinkWeights(first, keys.uniform, learned_weight(self.options.get("sinks"), G))

    def tables_by_a_kernel(self, result: Attention) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Sums over rows and keys by the kernel for GPUs; None for calls that it does not take.

        It takes bands in which every row sees a key, without masks, segments, sinks or soft cap.
        """
        q, k, v, options = self.query.detach(), self.key.detach(), self.value.detach(), self.options
        left, right = masks.band(bool(options.get("is_causal")), options.get("window"))
        rows = result.entropy, result.log_normalizer, result.logit_variance, result.max_logit
        if (
            not q.is_cuda
            or options.keys() & {"attn_mask", "bias", "segments", "sinks", "softcap"}
            or not q.ndim == k.ndim == v.ndim == 4
            or not len(q) == len(k) == len(v)
            or k.shape[1] != v.shape[1]
            or q.numel() == 0
            or q.dtype is not k.dtype
            or not self.every_row_sees_a_key()
            or not q.stride(3) == k.stride(3) == v.stride(3) == 1
            or max(q.shape[3], v.shape[3]) > LARGEST_HEAD
            or any(t is None or t.dtype is not torch.float32 or not t.is_contiguous() for t in rows)
            or (torch.is_autocast_enabled("cuda") and q.dtype is not torch.get_autocast_dtype("cuda"))
        ):
            return None
        kernel = kernel_module("gradlogz.kernels.attention.head_sums_gpu", "triton")
        if kernel is None:
            return None
        uniform = uniform_weight_of_a_band((q.shape[2], k.shape[2]), (left, right), q.device).flatten()
        scale = options.get("scale")
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        return kernel.head_sums(q, k, v, tuple(t.detach() for t in rows if t is not None), uniform, scale, left)

    def norms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Norms of queries [*b, m], keys and values [*b, n]."""
        q, k, v = (torch.linalg.vector_norm(t.detach(), dim=-1, dtype=dtype) for t in self[:3])
        return q, k, v


class Logits(NamedTuple):
    """Logits [b, h, m, n], the input of a softmax inside a layer."""

    logits: Float[Tensor, "b h m n"]

    def attend(self, statistics: str = "scalar") -> Attention:
        """Statistics of the rows; the output is None, since the layer itself multiplies by the values."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        s = self.logits.to(wide).masked_fill(hidden(self.logits), -torch.inf)
        highest = s.amax(-1)
        nonempty = highest != -torch.inf  # NaN counts as visible, and stays NaN
        # Relative to the maximum: an offset that all logits share must not cost digits of entropy and variance.
        offset = torch.where(nonempty, highest, 0.0).detach()
        s = s - offset.unsqueeze(-1)
        relative = torch.where(nonempty, s.logsumexp(-1), 0.0)
        G = torch.where(nonempty, offset + relative, -torch.inf)
        if statistics == "none":
            return Attention(None, G)  # type: ignore[arg-type]
        # Rows without a visible key, and keys without weight, contribute neither to a sum nor to a gradient.
        p = torch.where(nonempty.unsqueeze(-1), (s - relative.unsqueeze(-1)).exp(), 0.0)
        finite = s.masked_fill(s == -torch.inf, 0.0)
        mean = (p * finite).sum(-1)
        variance = (p * (finite - mean.unsqueeze(-1)).square()).sum(-1)
        entropy = torch.where(nonempty, relative - mean, 0.0).clamp(min=0.0)
        mean = torch.where(nonempty, mean + offset, 0.0)
        return Attention(None, G, entropy, mean, variance, highest)  # type: ignore[arg-type]

    def every_row_sees_a_key(self) -> bool:
        """Return False: the logits of a row may all be hidden."""
        return False

    def statistics(self) -> Attention:
        """Statistics of every row, without a gradient."""
        return Logits(self.logits.detach()).attend()

    def sight(self) -> None:
        """Return None: masks are part of the logits, which no other layer has."""

    def visible_keys(self) -> KeyVisibility:
        """Keys that the rows see, by their logits."""
        visible, s = visible_by_logits(self.logits), self.logits
        uniform = uniform_weight((s.shape[2], s.shape[3]), (None, None), None, None, visible, s.device)
        return KeyVisibility.of(visible, _first(visible), uniform)

    def sink_weights(self, log_normalizer: Tensor, keys: KeyVisibility) -> SinkWeights:
        """Weights of every row on the first visible key of its sequence."""
        s, G = self.logits.detach(), log_normalizer
        assert keys.position is not None
        assert keys.uniform is not None
        logit = s.gather(-1, keys.position[:, None, :, None].expand(*s.shape[:3], 1)).squeeze(-1)
        first = torch.where(G != -torch.inf, (logit.to(G.dtype) - G).exp(), 0.0)
        return SinkWeights(first, keys.uniform, learned_weight(None, G))

    def tables_by_a_kernel(self, _result: Attention) -> None:
        """Return None: queries and keys are unknown."""

    def norms(self, dtype: torch.dtype) -> None:
        """Return None: queries and keys are unknown."""


def call_from_interface(
    implementation: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> Call:
    """Convert the call of a Hugging Face layer to one of the attention implementations of transformers.

    The form of the mask depends on the implementation: "eager" has a complete additive mask; "sdpa" a bool mask, or
    none if the causal flag suffices; flash kernels a flag, a window and the padding [b, n]; flex_attention a block
    mask.
    """
    for name in ("block_indices", "cache"):
        if others.get(name) is not None:
            problem = f"{type(module).__name__} selects keys by {name}=, which attend does not support"
            raise InputNotImplementedError("attend", name, problem, "Use another attention implementation.")
    flash = implementation is not None and "flash" in implementation
    packing = (cu_seq_lens_q, position_ids) if flash else ()
    mask_sources = (attention_mask, position_bias, indices, *packing)
    m, n = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "dropout_p": dropout}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if flash:
        options["is_causal"] = bool(causal)
        options["window"] = None if sliding_window is None else _window(sliding_window, bool(causal))
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None, -n:].bool()
        elif cu_seq_lens_q is not None:
            options["segments"] = masks.documents(cu_seq_lens_q, n).unsqueeze(0)
        elif position_ids is not None and len(query) == 1 and position_ids.shape[-1] == m == n:
            options["segments"] = (position_ids.reshape(-1, n)[:1] == 0).cumsum(-1)  # packed: positions restart at 0
    elif attention_mask is None and causal and m > 1 and implementation not in ("eager", "flex_attention"):
        options["is_causal"] = True
        # A static cache after its first tokens: the unused rest is hidden.
        key, value = key[:, :, :m], value[:, :, :m]
        position_bias = None if position_bias is None else position_bias[..., :m]
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        attention_mask = _dense(attention_mask, query, n)
    if attention_mask is not None and attention_mask.shape[-1] > n:
        attention_mask = attention_mask[..., :n]
    attention_mask = _with_hidden_keys(attention_mask)
    if indices is not None:
        attention_mask = _with_selected_keys(attention_mask, indices, key.shape[2])
    options["attn_mask"], options["bias"], options["sinks"] = attention_mask, position_bias, s_aux
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    return Call(
        query, key, value, {k: v for k, v in options.items() if v is not None},
        mask_sources=mask_sources if all(t is None or isinstance(t, Tensor) for t in mask_sources) else None,
    )  # fmt: skip


def call_from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """Convert a call of scaled_dot_product_attention, whose causal mask is aligned with the first key."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    alignment = masks.causal_alignment(attn_mask)
    if alignment is None:
        options["attn_mask"] = _with_hidden_keys(attn_mask)
    if is_causal:
        alignment = "first"
    if alignment is not None:
        key, value, band = masks.causal(alignment, key, value, query.shape[-2])
        options |= band
    mask_sources = (attn_mask,) if "attn_mask" in options else None
    return Call(query, key, value, {k: v for k, v in options.items() if v is not None}, mask_sources=mask_sources)


def call_from_attend(query: Tensor, key: Tensor, value: Tensor, *, statistics: str = "scalar", **options: Any) -> Call:
    """Convert a call of `attend`."""
    key, value, options = masks.without_mask_objects(query, key, value, options)
    return Call(query, key, value, {k: v for k, v in options.items() if v is not None}, statistics)


def call_from_operator(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, scoring: Scoring, sinks: Tensor | None
) -> Call:
    """Convert a call of the operator, inside a compiled graph, which computes the statistics without the sinks."""
    scale, softcap, left, right = scoring
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "enable_gqa": query.shape[1] != key.shape[1]}
    options |= {"attn_mask": sight.mask, "bias": sight.bias, "segments": sight.segments, "sinks": sinks}
    if left is None and right == 0:
        options["is_causal"] = True
    elif left is not None or right is not None:
        options["window"] = left, right
    return Call(query, key, value, {k: v for k, v in options.items() if v is not None}, "scalar")


def logits_from_softmax(module: nn.Module, logits: Tensor) -> Logits:
    """Arrange the logits of a layer as [b, h, m, n].

    In layers that attend within windows or blocks of keys the heads may be another dimension; it is recognised by the
    number of heads.
    """
    h = next((getattr(module, name) for name in HEADS if isinstance(getattr(module, name, None), int)), 0)
    if logits.ndim == 3:
        divisible = h > 0 and logits.shape[0] % h == 0
        return Logits(logits.unflatten(0, (-1, h)) if divisible else logits.unsqueeze(1))
    if logits.shape[-3] != h and logits.shape[1] == h:  # [b, h, blocks, m, n]
        logits = logits.flatten(2, -2)
    elif logits.shape[-3] != h and logits.shape[-2] == h:  # [b, m, h, n]
        logits = logits.transpose(-3, -2)
    return Logits(logits if logits.ndim == 4 else logits.reshape(-1, *logits.shape[-3:]))


def _with_hidden_keys(mask: Tensor | None) -> Tensor | None:
    """Set hidden entries of an additive mask to -inf: finite ones would have weight in rows that see no key."""
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.masked_fill(hidden(mask), -torch.inf)


def _with_selected_keys(mask: Tensor | None, indices: Tensor, n: int) -> Tensor:
    """Hide all keys but those selected for each query, [b, m, number of keys], from a mask [b, 1, m, n]."""
    selected = indices.new_zeros((*indices.shape[:2], n), dtype=torch.bool).scatter(-1, indices.long(), True)
    selected = selected.unsqueeze(1)
    if mask is None:
        return selected
    return mask & selected if mask.dtype == torch.bool else mask.masked_fill(~selected, -torch.inf)


def _window(size: int, causal: bool) -> tuple[int, int]:
    """Window (left, right) of `size` keys that include the query's own; without causality as many on each side."""
    return size - 1, 0 if causal else size - 1


def _dense(block_mask: Any, query: Tensor, n: int) -> Tensor:
    """Bool mask equal to a block mask of flex_attention."""
    if not hasattr(block_mask, "mask_mod"):
        remedy = "Use the sdpa or eager implementation."
        fact = type(block_mask).__name__
        raise InputTypeError(
            "attend", "attention_mask", f"attention_mask must be a tensor or a block mask, got {fact}", remedy
        )
    return masks.dense(block_mask, query.shape[2], n)


def _first(visible: Tensor) -> Tensor:
    """Position of the first visible key of each sequence, [b, 1]."""
    return visible.any(-2).int().argmax(-1, keepdim=True)
