"""Scaled dot-product attention that reports its own statistics.

    s_mn   = <q_m, k_n> scale + bias_mn               the logit, -inf where masked
    G_m    = log sum_n exp s_mn                       log_normalizer                    [shim22, Eq. 5]
    output = sum_n p_mn v_n,  p = exp(s - G)          the gradient of G in omega        [theory 3.9]
    H_m    = G_m - sum_n p_mn s_mn                    entropy                           [theory 3.5]

Read next: result.py (the fields), masks.py (who sees whom), ../kernels/attention/operator.py (how it is
differentiated).
"""

import math
from functools import lru_cache
from typing import Literal, SupportsIndex

import torch
from torch.overrides import handle_torch_function, has_torch_function

from .._errors import InputNotImplementedError, InputTypeError, InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor
from ..kernels.attention import dispatch
from ..kernels.attention.dropout import Dropout
from ..kernels.attention.operator import attention, undisturbed
from ..kernels.attention.reference import Statistics, StatisticsAndMean
from ..kernels.attention.scoring import Scoring, Sight
from . import masks
from .result import Attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EVERYTHING = Sight()


def attend(
    query: Float[Tensor, "*bq m d"],
    key: Float[Tensor, "*bk n d"],
    value: Float[Tensor, "*bv n v"],
    *,
    attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Float[Tensor, "..."] | None = None,
    softcap: float | None = None,
    window: tuple[SupportsIndex | None, SupportsIndex | None] | None = None,
    segments: Int[Tensor, "..."] | None = None,
    statistics: Literal["none", "scalar", "moments"] = "scalar",
) -> Attention:
    """softmax(<q, k> scale) v with the log normaliser, entropy, logit mean, variance and maximum of every row.

    The arguments are those of `torch.nn.functional.scaled_dot_product_attention`, by keyword, and so is the output. The
    statistics cost no second pass; memory is linear in the number of tokens. Everything is differentiable, twice, in
    forward and reverse mode, under vmap; under torch.compile once, in reverse mode. Statistics are float32 for half
    precision.

    Where it differs from its neighbour:
      - `is_causal` aligns the last query with the last key (decoding with a cache); SDPA aligns the first ones. They
        agree for as many queries as keys. It may be combined with a mask.
      - A row that sees no key has output 0, never NaN, and gradient 0; `Attention.seen` says which rows do see one.
      - dropout acts on the output alone: the statistics are those of the weights before it.

    Args:
        attn_mask: bool (True = attend) or added to the logits; broadcasts against [*b, h, m, n].
        bias: added to the logits beside a bool mask. Its own gradient is the only thing of size m x n.
        scale: 1 / sqrt(d) by default.
        enable_gqa: the heads of key and value, dimension -3, are shared by groups of query heads.
        sinks: one extra logit per query head, [h] or [*b, h], without a value: it takes weight, adds 0 to the output
            and counts in every statistic; -inf is no sink.
        softcap: logits become softcap tanh(logit / softcap), before bias and mask.
        window: keys seen before and after the query's own position, (left, right), itself not counted; None is no
            limit. Hugging Face's sliding_window=W is (W - 1, 0).
        segments: an integer for each key, [*b, n]; a query sees keys of its own segment. Query i is of the segment of
            key n - m + i.
        statistics: "none" for output and log normaliser, "moments" for key_mean, key_variance and value_variance too;
            fields that were not asked for are None. Variances of keys and values keep the digits that are left of
            their squared distance from the average of all keys.

    Law: tests/agreement/test_attend_agrees_with_sdpa.py, tests/laws/test_attend_is_the_empirical_measure.py.

    >>> import torch
    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(2, 4, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    >>> a = attend(q, k, v)
    >>> torch.allclose(a.output, scaled_dot_product_attention(q, k, v))
    True
    >>> torch.allclose(a.log_normalizer, (q @ k.mT / 8**0.5).logsumexp(-1))
    True
    """
    if has_torch_function((query, key, value)):  # subclasses of tensors, and who watches a model
        return handle_torch_function(
            attend, (query, key, value), query, key, value, attn_mask=attn_mask, bias=bias, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, sinks=sinks, softcap=softcap, window=window,
            segments=segments, statistics=statistics,
        )  # fmt: skip
    left, right = (None, 0 if is_causal else None) if window is None else masks.band(is_causal, window)
    if (
        attn_mask is bias is segments is sinks is None
        and dropout_p == 0.0
        and (statistics == "scalar" or statistics == "none")
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and undisturbed((query, key, value))
        and query.dtype is key.dtype is value.dtype
        and query.device == key.device == value.device
        and not query.is_nested
        and not torch._C._is_any_autocast_enabled()
    ):  # a call of few tokens lasts no longer than it takes to look at all that it might be
        shapes = query.shape, key.shape, value.shape
        usual = _usual(query.dtype, shapes, bool(enable_gqa), scale, softcap, left, right)
        if usual is not None:
            rows = dispatch.forward(query, key, value, EVERYTHING, usual, None, statistics=statistics == "scalar")
            return Attention(*rows[:2]) if statistics == "none" else _scalars(rows, query, key, EVERYTHING)
    _check(query, key, value, dropout_p, statistics)
    _check_number("scale", scale)
    _check_number("softcap", softcap)
    autocast = _autocast(query)
    if autocast and query.dtype != torch.float64:  # what it does to SDPA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    lead, (q, k, v) = _four_dimensional(query, key, value, enable_gqa)
    (_, h, m, d), n = q.shape, k.shape[2]
    sight = masks.sight(attn_mask, bias, segments, lead=lead, size=(h, m, n), like=query)
    scoring = Scoring(1 / math.sqrt(d) if scale is None else float(scale), softcap, left, right)
    dropout = None
    if dropout_p > 0:
        dropout = Dropout(float(dropout_p), torch.randint(1 << 62, (), device=query.device))
    if autocast:
        with torch.autocast(query.device.type, enabled=False):
            found = _with_sinks(_statistics(q, k, v, sight, scoring, dropout, statistics), sinks, lead)
    else:
        found = _with_sinks(_statistics(q, k, v, sight, scoring, dropout, statistics), sinks, lead)
    if found.output.dtype is not query.dtype:
        found = Attention(found.output.to(query.dtype), *found[1:])
    if q is query:
        return found
    return _like(found, () if query.ndim == key.ndim == value.ndim == 2 else (*lead, h), m)


@lru_cache(maxsize=1024)
def _usual(
    dtype: torch.dtype,
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    enable_gqa: bool,
    scale: float | None,
    softcap: float | None,
    left: int | None,
    right: int | None,
) -> Scoring | None:
    """The logits of a call without masks whose operands are as kernels take them; None if it needs a closer look."""
    of_query, of_key, of_value = shapes
    if dtype not in DTYPES or not len(of_query) == len(of_key) == len(of_value) == 4:
        return None
    if of_query[0] != of_key[0] or of_key[:3] != of_value[:3] or of_query[3] != of_key[3]:
        return None
    (_, h, _, d), (_, hk, n, _) = of_query, of_key
    if not (d and n and hk) or (h % hk if enable_gqa else h != hk):
        return None
    scale = 1 / math.sqrt(d) if scale is None else scale
    if not math.isfinite(scale) or (softcap is not None and not 0 < softcap < math.inf):
        return None
    return Scoring(scale, softcap, left, right)


def _statistics(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scoring: Scoring, dropout: Dropout | None, statistics: str
) -> Attention:
    if statistics == "moments":
        return _moments(q, k, v, sight, scoring, dropout)
    found = attention(q, k, v, sight, scoring, dropout, statistics=statistics == "scalar")
    if statistics == "none":
        return Attention(found.output, found.log_normalizer)
    return _scalars(found, q, k, sight)


def _may_be_empty(q: Tensor, k: Tensor, sight: Sight) -> bool:
    """Whether a row may see no key: without masks every query sees its own position, if there is one."""
    bias, mask, segments = sight
    return bias is not None or mask is not None or segments is not None or q.shape[2] > k.shape[2]


def _scalars(found: Statistics, q: Tensor, k: Tensor, sight: Sight) -> Attention:
    output, G, H, V, top = found
    E = found.mean_logit if isinstance(found, StatisticsAndMean) else None
    if E is None:
        E = (G - H).masked_fill(G == -torch.inf, 0.0) if _may_be_empty(q, k, sight) else G - H
    return Attention(output, G, H, E, V, top)


def _moments(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scoring: Scoring, dropout: Dropout | None) -> Attention:
    """One pass over wider values: [v, v^2, k, |k|^2], centred because an offset would cost digits."""
    wide = torch.promote_types(q.dtype, torch.float32)
    center_k, center_v = (torch.nan_to_num(t.detach().to(wide).mean(-2, keepdim=True), 0.0, 0.0, 0.0) for t in (k, v))
    y = v.to(wide) - center_v
    values = [y, y.square()]
    if v is not k:  # else the first two say it all
        x = k.to(wide) - center_k
        values += [x, x.square().sum(-1, keepdim=True)]
    whole = attention(q.to(wide), k.to(wide), torch.cat(values, -1), sight, scoring)
    mean_v, square_v, *of_keys = whole.output.split([t.shape[-1] for t in values], -1)
    value_variance = (square_v - mean_v.square()).clamp(min=0)
    mean_k, key_variance = mean_v, value_variance.sum(-1)
    if of_keys:
        mean_k, square_k = of_keys
        key_variance = (square_k.squeeze(-1) - mean_k.square().sum(-1)).clamp(min=0)

    group = q.shape[1] // max(1, k.shape[1])
    center_k, center_v = (c.repeat_interleave(group, 1) for c in (center_k, center_v))
    if _may_be_empty(q, k, sight):
        alive = (whole.log_normalizer != -torch.inf).unsqueeze(-1)
        center_k, center_v = (torch.where(alive, c, 0.0) for c in (center_k, center_v))
    output = mean_v + center_v if dropout is None else attention(q, k, v, sight, scoring, dropout).output
    scalars = _scalars(whole, q, k, sight)[1:6]
    return Attention(output, *scalars, mean_k + center_k, key_variance, value_variance)


def _with_sinks(found: Attention, sinks: Tensor | None, lead: torch.Size) -> Attention:
    return found if sinks is None else found.joined(_sink(sinks, found, lead))


def _sink(sinks: Tensor, like: Attention, lead: torch.Size) -> Attention:
    """The result of attention to one key at 0 with value 0 and this logit."""
    h = like.log_normalizer.shape[1]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        fact = f"{sinks.dtype}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise InputTypeError(
            "attend", "sinks", f"sinks must be a floating tensor, got {fact}", "Pass one logit per query head."
        )
    if sinks.device != like.output.device:
        remedy = "Move it with sinks.to(query.device)."
        raise InputValueError("attend", "sinks", f"sinks must be on {like.output.device}, got {sinks.device}", remedy)
    if sinks.ndim == 0 or not masks.broadcasts((1,) * (len(lead) + 1 - sinks.ndim) + tuple(sinks.shape), (*lead, h)):
        condition = f"sinks must be [h] or [*b, h] with h={h} query heads"
        raise InputValueError(
            "attend", "sinks", f"{condition}, got shape {shape_of(sinks)}", "Pass one logit per query head."
        )
    whole = sinks.to(like.log_normalizer.dtype).expand(*lead, h).reshape(math.prod(lead), h, 1)
    logit = whole.expand_as(like.log_normalizer)
    zero, mean = torch.zeros_like(logit), logit.masked_fill(logit == -torch.inf, 0.0)
    return Attention(
        torch.zeros_like(like.output),
        logit,
        *(None if t is None else s for t, s in zip(like[2:6], (zero, mean, zero, logit), strict=True)),
        *(None if t is None else torch.zeros_like(t) for t in like[6:]),
    )


def _like(found: Attention, lead: tuple[int, ...], m: int) -> Attention:
    """Back to the leading dimensions of the query."""
    return Attention(*(None if t is None else t.reshape(*lead, m, *t.shape[3:]) for t in found))  # type: ignore[arg-type]


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[torch.Size, tuple[Tensor, Tensor, Tensor]]:
    """[b, h, m, d], [b, hk, n, d], [b, hk, n, v] and the leading dimensions that became b."""
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if len(of_query) == len(of_key) == len(of_value) == 4 and of_query[0] == of_key[0] and of_key[:2] == of_value[:2]:
        h, of_keys = of_query[1], of_key[1]
        if h == of_keys or (enable_gqa and of_keys and h % of_keys == 0):
            lead = torch.Size(of_query[:1])
            return lead, (query, key, value)  # the usual cases, in which nothing is to be done
    try:
        lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    except RuntimeError:
        fact = ", ".join(f"{name} {shape_of(t)}" for name, t in _named(query, key, value))
        remedy = "Dimensions before the heads must be equal or 1."
        raise InputValueError("attend", "query", f"batch dimensions must broadcast, got {fact}", remedy) from None
    heads = [1 if t.ndim < 3 else t.shape[-3] for t in (query, key, value)]
    of_keys = max(heads[1:])
    h = max(heads) if heads[0] == 1 else heads[0]
    if any(count not in (1, of_keys) for count in heads[1:]) or of_keys not in (1, h):
        shared = enable_gqa and heads[1] == heads[2] and of_keys and h % of_keys == 0
        if not shared:
            fact = f"{heads[0]}, {heads[1]} and {heads[2]} heads of query, key and value"
            condition = "key heads must divide query heads" if enable_gqa else "heads must be equal"
            remedy = "Use a multiple of the number of key heads."
            if not enable_gqa:
                remedy = "Pass enable_gqa=True if groups share key heads; tensors are [*b, heads, tokens, size]."
            raise InputValueError("attend", "key", f"{condition}, got {fact}", remedy)
    whole = (h, of_keys, of_keys)
    arranged = []
    for t, count in zip((query, key, value), whole, strict=True):
        t = t if t.ndim >= 3 else t.unsqueeze(0)
        if t.shape[:-2] != (*lead, count):  # torch cannot trace a view of a dual number
            t = t.expand(*lead, count, *t.shape[-2:])
        arranged.append(t if t.ndim == 4 else t.reshape(math.prod(lead), *t.shape[-3:]))
    return lead, (arranged[0], arranged[1], arranged[2])


def _named(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[str, Tensor], ...]:
    return ("query", query), ("key", key), ("value", value)


def _autocast(tensor: Tensor) -> bool:
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False  # which is quick to say
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def _check_number(name: str, number: float | None) -> None:
    """A tensor would get no gradient, and say nothing."""
    if number is None:
        return
    if isinstance(number, Tensor):
        remedy = "For a learned temperature pass query * scale and scale=1.0; a soft cap is fixed."
        raise InputTypeError("attend", name, f"{name} must be a number, got a tensor", remedy)
    if torch.compiler.is_compiling():  # it may be a symbol
        return
    if not isinstance(number, float | int) or not math.isfinite(number) or (name == "softcap" and number <= 0):
        condition = "softcap must be positive and finite" if name == "softcap" else "scale must be a finite number"
        raise InputValueError("attend", "softcap", f"{condition}, got {number!r}", f"Leave {name} out for its default.")


def _check(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, statistics: str) -> None:
    """Everything that can be said before anything is computed."""
    if not _alike(query, key, value):
        _check_tensors(query, key, value)
    (*_, d), (*_, n, of_keys), (*_, of_values, _) = query.shape, key.shape, value.shape
    if d != of_keys or d == 0:
        condition = f"key must end in d={d} > 0, the dimension of query"
        raise InputValueError("attend", "key", f"{condition}, got shape {shape_of(key)}", "Project one of them first.")
    if n != of_values:
        condition = f"value must hold n={n} tokens, one for each key"
        raise InputValueError(
            "attend", "value", f"{condition}, got shape {shape_of(value)}", "Cut or pad one of them first."
        )
    if n == 0:
        remedy = "To hide all keys use a mask: such rows have output 0 and log normaliser -inf."
        raise InputValueError("attend", "key", f"key must hold at least one token, got shape {shape_of(key)}", remedy)
    if not 0.0 <= dropout_p < 1.0:
        remedy = "Pass the probability of dropping a weight."
        raise InputValueError("attend", "dropout_p", f"dropout_p must be in [0, 1), got {dropout_p}", remedy)
    if statistics not in ("none", "scalar", "moments"):
        condition, remedy = 'statistics must be "none", "scalar" or "moments"', "Leave it out for the scalars."
        raise InputValueError("attend", "statistics", f"{condition}, got {statistics!r}", remedy)
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        condition, fact = "the call must not be exported", "torch.export, which knows only torch's own operators"
        remedy = "Export with scaled_dot_product_attention in its place."
        raise InputNotImplementedError("attend", None, f"{condition}, got {fact}", remedy)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are plain tensors of one dtype, on one device, of enough dimensions: the usual case at one look."""
    return (
        type(query) is type(key) is type(value) is Tensor
        and query.dtype is key.dtype is value.dtype
        and query.dtype in DTYPES
        and query.device == key.device == value.device
        and query.ndim == key.ndim == value.ndim >= 2
        and not query.is_nested
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What they are, one by one and to each other."""
    for name, t in _named(query, key, value):
        if not isinstance(t, Tensor):
            fact, remedy = type(t).__name__, "Wrap it in torch.as_tensor."
            raise InputTypeError("attend", name, f"{name} must be a tensor, got {fact}", remedy)
        if t.is_nested:
            remedy = "Pad it with torch.nested.to_padded_tensor and mask, or pack it and pass segments."
            raise InputTypeError("attend", name, f"{name} must be a plain tensor, got a nested tensor", remedy)
        if t.dtype not in DTYPES:
            remedy = "Convert it to float16, bfloat16, float32 or float64."
            raise InputTypeError("attend", name, f"{name} must be floating, got {t.dtype}", remedy)
        if t.ndim < 2:
            fact, remedy = f"shape {shape_of(t)}", "Add the missing dimensions with unsqueeze."
            raise InputValueError("attend", name, f"{name} must be [*b, tokens, features], got {fact}", remedy)
    if not query.dtype == key.dtype == value.dtype:
        castable = _autocast(query) and torch.float64 not in (query.dtype, key.dtype, value.dtype)
        if not castable:
            fact = ", ".join(f"{name} {t.dtype}" for name, t in _named(query, key, value))
            remedy = "Convert one of them with .to(dtype)."
            raise InputTypeError("attend", "query", f"query, key and value must share one dtype, got {fact}", remedy)
    if not query.device == key.device == value.device:
        fact = ", ".join(f"{name} on {t.device}" for name, t in _named(query, key, value))
        remedy = "Move one of them with .to(device)."
        raise InputValueError("attend", "query", f"query, key and value must be on one device, got {fact}", remedy)
