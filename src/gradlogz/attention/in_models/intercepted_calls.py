"""One attention computation inside somebody's model, brought into the arguments of `attend`.

    of_interface   what a Hugging Face layer hands to its attention function      masks as the implementation makes them
    of_sdpa        a call of torch's scaled_dot_product_attention                  causal from the upper left
    Logits         what a layer hands to its own softmax                           scale, bias and mask already inside

Hugging Face's words: `scaling` is the scale and not always 1 / sqrt(d), `s_aux` are sinks, `position_bias` is a bias, a
sliding window of W is (W - 1, 0), and whether a layer is causal is said by the layer where the call leaves it open.

Read next: interception.py (where calls are met), ../functional.py (attend).
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from ..._errors import InputNotImplementedError, InputTypeError
from ..._typing import Float, Tensor
from ..functional import attend
from ..result import Attention
from .hidden_keys import hidden, visible_by_logits, visible_by_masks

# As few values as the kernels for a GPU take.
WIDTH = 16

# The names under which layers keep the number of their heads.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead")


class Call(NamedTuple):
    """Query, key and value [b, h, tokens, size], and the options with which `attend` computes the same attention."""

    query: Float[Tensor, "b h m d"]
    key: Float[Tensor, "b hk n d"]
    value: Float[Tensor, "b hk n v"]
    options: dict[str, Any]
    asked: str = "none"

    def attend(self, statistics: str = "scalar") -> Attention:
        """This call, made by `attend`, with these statistics or those that were asked for, whichever are more."""
        most = max(statistics, self.asked, key=("none", "scalar", "moments").index)
        return attend(self.query, self.key, self.value, statistics=most, **self.options)  # type: ignore[arg-type]

    def weight_of(self, position: Tensor | None) -> tuple[Attention, Tensor]:
        """The statistics of every row, and its weight on the key at one position of each sequence, the first if None.

        Computed beside the model: without gradients, without dropout, and with values that are 1 at that key and 0 at
        all others, so that their average is the weight.
        """
        q, k = self.query.detach(), self.key.detach()
        if position is None:
            value = k.new_zeros(k.shape[-2], WIDTH)
            value[0, 0] = 1.0
        else:
            value = k.new_zeros(len(position), 1, k.shape[-2], WIDTH)
            value[torch.arange(len(position), device=k.device), :, position, 0] = 1.0
            k = k.expand(len(position), -1, -1, -1)
        options: dict[str, Any] = {k: v.detach() if isinstance(v, Tensor) else v for k, v in self.options.items()}
        options["dropout_p"] = 0.0
        found = attend(q, k, value.expand(*k.shape[:-1], WIDTH), **options)
        return found, found.output[..., 0]


class Logits(NamedTuple):
    """The logits [b, h, m, n] that a layer hands to its softmax."""

    logits: Float[Tensor, "b h m n"]

    def attend(self, statistics: str = "scalar") -> Attention:
        """The statistics of the rows; the layer multiplies the values itself, so that the output is None."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        s = self.logits.to(wide).masked_fill(hidden(self.logits), -torch.inf)
        highest = s.amax(-1)
        seen = highest != -torch.inf  # NaN is seen, and stays NaN
        G = torch.where(seen, s.logsumexp(-1), -torch.inf)
        if statistics == "none":
            return Attention(None, G)  # type: ignore[arg-type]
        # Rows without a key, and keys without weight, add nothing: neither to a sum nor to a gradient.
        p = torch.where(seen.unsqueeze(-1), (s - torch.where(seen, G, 0.0).unsqueeze(-1)).exp(), 0.0)
        finite = s.masked_fill(s == -torch.inf, 0.0)
        mean = (p * finite).sum(-1)
        variance = (p * (finite - mean.unsqueeze(-1)).square()).sum(-1)
        entropy = torch.where(seen, G - mean, 0.0).clamp(min=0.0)
        return Attention(None, G, entropy, mean, variance, highest)  # type: ignore[arg-type]

    def weight_of(self, position: Tensor | None) -> tuple[Attention, Tensor]:
        """The statistics of every row, and its weight on the key at one position of each sequence."""
        s, found = self.logits.detach(), Logits(self.logits.detach()).attend()
        if position is None:
            logit = s[..., 0]
        else:
            logit = s.gather(-1, position[:, None, None, None].expand(*s.shape[:3], 1)).squeeze(-1)
        G = found.log_normalizer
        return found, torch.where(G != -torch.inf, (logit.to(G.dtype) - G).exp(), 0.0)


def of_interface(
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
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> Call:
    """The call that a Hugging Face layer makes with one of transformers' implementations.

    Each implementation has its own masks: "eager" an added one that says everything, "sdpa" a bool one or none where
    the causal flag says it, the flash kernels a flag, a window and the padding [b, n], flex_attention a block mask.
    """
    for name in ("indices", "block_indices", "cache"):
        if others.get(name) is not None:
            condition, remedy = "the layer must let its queries see keys by a mask", "Use another implementation."
            raise InputNotImplementedError(
                "attend", "model", f"{condition}, got {name}= of {type(module).__name__}", remedy
            )
    flash = implementation is not None and "flash" in implementation
    m, n = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "dropout_p": dropout}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if flash:
        options["is_causal"] = bool(causal)
        options["window"] = None if sliding_window is None else _window(sliding_window, bool(causal))
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None, -n:].bool()
        elif cu_seq_lens_q is not None:
            options["segments"] = _segments(cu_seq_lens_q, n)
        elif position_ids is not None and len(query) == 1 and position_ids.shape[-1] == m == n:
            options["segments"] = (position_ids.reshape(-1, n)[:1] == 0).cumsum(-1)  # packed: positions begin again
    elif attention_mask is None and causal and m > 1 and implementation not in ("eager", "flex_attention"):
        options["is_causal"] = True
        # The first tokens into a cache that has room for more: the rest of it is not to be seen.
        key, value = key[:, :, :m], value[:, :, :m]
        position_bias = None if position_bias is None else position_bias[..., :m]
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        attention_mask = _dense(attention_mask, query, n)
    if attention_mask is not None and attention_mask.shape[-1] > n:
        attention_mask = attention_mask[..., :n]
    attention_mask = _shut(attention_mask)
    options["attn_mask"], options["bias"], options["sinks"] = attention_mask, position_bias, s_aux
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    return Call(query, key, value, {k: v for k, v in options.items() if v is not None})


def of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """A call of torch.nn.functional.scaled_dot_product_attention, whose causal flag counts from the first key."""
    m, n = query.shape[-2], key.shape[-2]
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    options["attn_mask"] = _shut(attn_mask)
    if is_causal and n >= m:
        options["is_causal"] = True
        key, value = key[..., :m, :], value[..., :m, :]
    elif is_causal:
        options["window"] = (None, m - n)
    return Call(query, key, value, {k: v for k, v in options.items() if v is not None})


def of_attend(query: Tensor, key: Tensor, value: Tensor, *, statistics: str = "scalar", **options: Any) -> Call:
    """A call of `attend`."""
    return Call(query, key, value, {k: v for k, v in options.items() if v is not None}, statistics)


def of_softmax(module: nn.Module, logits: Tensor) -> Logits:
    """The logits of a layer, its heads in the dimension before the queries.

    Where that is another dimension, as in layers that look at windows or blocks of keys, the number of heads tells.
    """
    h = next((getattr(module, name) for name in HEADS if isinstance(getattr(module, name, None), int)), 0)
    if logits.ndim == 3:
        whole = h > 0 and logits.shape[0] % h == 0
        return Logits(logits.unflatten(0, (-1, h)) if whole else logits.unsqueeze(1))
    if logits.shape[-3] != h and logits.shape[1] == h:  # [b, h, blocks, m, n]
        logits = logits.flatten(2, -2)
    elif logits.shape[-3] != h and logits.shape[-2] == h:  # [b, m, h, n]
        logits = logits.transpose(-3, -2)
    return Logits(logits if logits.ndim == 4 else logits.reshape(-1, *logits.shape[-3:]))


def _shut(mask: Tensor | None) -> Tensor | None:
    """A mask in which no key that is not to be seen has a finite number: it would be one for rows that see none."""
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.masked_fill(hidden(mask), -torch.inf)


def _window(size: int, causal: bool) -> tuple[int, int]:
    """A window of that many keys, the query's own among them; both ways it is as many to each side."""
    return size - 1, 0 if causal else size - 1


def _segments(boundaries: Tensor, n: int) -> Tensor:
    """[1, n]: the number of the packed sequence of each key, from the positions at which sequences begin."""
    return torch.bucketize(torch.arange(n, device=boundaries.device), boundaries[1:], right=True).unsqueeze(0)


def _dense(block_mask: Any, query: Tensor, n: int) -> Tensor:
    """The bool mask that a block mask of flex_attention stands for."""
    if not hasattr(block_mask, "mask_mod"):
        remedy = "Use the sdpa or eager implementation."
        fact = type(block_mask).__name__
        raise InputTypeError(
            "attend", "attention_mask", f"attention_mask must be a tensor or a block mask, got {fact}", remedy
        )
    from torch.nn.attention.flex_attention import create_mask

    b, h, m, _ = query.shape
    heads = h if block_mask.shape[1] > 1 else None
    return create_mask(block_mask.mask_mod, b, heads, m, n, device=str(query.device))


def visible(call: Call | Logits) -> Tensor | None:
    """[b, n]: keys that some query of their sequence may see; None if no mask says so."""
    if isinstance(call, Logits):
        return visible_by_logits(call.logits)
    return visible_by_masks((call.options.get("attn_mask"), call.options.get("bias")), call.query, call.key)


def padding(call: Call | Logits) -> Tensor | None:
    """[b, m]: queries that are padding, because no query of their own sequence may see them as a key; None if unknown.

    That is known where a mask is given and queries are the keys. Their rows are numbers that no loss looks at.
    """
    m, n = call.logits.shape[2:] if isinstance(call, Logits) else (call.query.shape[-2], call.key.shape[-2])
    seen = visible(call) if m == n else None
    return None if seen is None else ~seen
