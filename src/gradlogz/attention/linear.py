"""Linear attention: weights are products of features, so that keys and values are summed once for all queries.

    a_mn   = scale <phi(q_m), phi(k_n)>                  weight of a key                               [katharopoulos20]
    S      = sum_n phi(k_n) v_n^T,   z = sum_n phi(k_n)  state: a Hebbian matrix, and its mass
    output = scale S^T phi(q) / exp G                    G = log sum_n a_mn, normalised: phi >= 0
    output = scale S^T q                                 identity features, without normalisation
    G(q)   = scale sum_n <q, k_n>² / 2                   identity: its gradient is the output for values = keys

The last line is minus the energy of a classical Hopfield network with the Hebbian weights sum_n k_n k_n^T, and the log
normaliser of N(0, scale sum_n k_n k_n^T): identity features attend to a Gaussian with the second moments of the keys.
[shim22, Cor. 1]

With a causal mask the state grows token by token; chunks of tokens are computed at once, and between them the states
are added up.

Read next: sigmoid.py, ../dynamics/ising.py (the network with these weights), layers/linear.py.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from .._autocast import autocast_disabled
from .._errors import InputTypeError, InputValueError, shape_of
from .._typing import Bool, Float, Tensor
from ..kernels.losses.rowwise import rowwise
from . import masks
from .operands import Operands, operands

CHUNK = 64  # tokens of a causal chunk: the states between chunks take size² / CHUNK numbers for each token

FeatureMap = Callable[[Tensor], Tensor]


def _positive(x: Tensor) -> Tensor:
    """elu(x) + 1, without cancellation for small features."""
    return torch.where(x > 0, x + 1, x.clamp(max=0.0).exp())


FEATURE_MAPS: dict[str, FeatureMap] = {"elu": _positive, "relu": torch.relu, "identity": lambda x: x}


class LinearState(NamedTuple):
    """Sums over the keys so far, which later queries need: the memory of a recurrent network.

    Attributes:
        memory: S = sum_n phi(k_n) v_n^T.
        mass: z = sum_n phi(k_n), with normalisation.
        moments: sum_n phi(k_n) phi(k_n)^T, without normalisation and with statistics: the Hebbian weights of the keys.
    """

    memory: Float[Tensor, "*b f v"]
    mass: Float[Tensor, "*b f"] | None = None
    moments: Float[Tensor, "*b f f"] | None = None


class LinearAttended(NamedTuple):
    """Output, log normaliser of each row, and the state after the last key.

    Attributes:
        log_normalizer: G; with normalisation log sum_n a_mn, -inf for a row whose weights are all 0, and otherwise
            scale sum_n <phi(q), phi(k_n)>² / 2. None if statistics are not computed.
    """

    output: Float[Tensor, "*b m v"]
    log_normalizer: Float[Tensor, "*b m"] | None
    state: LinearState


def linear_attend(
    query: Float[Tensor, "*b m d"],
    key: Float[Tensor, "*b n d"],
    value: Float[Tensor, "*b n v"],
    *,
    feature_map: str | FeatureMap = "elu",
    normalize: bool | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    state: LinearState | None = None,
    statistics: Literal["none", "scalar"] = "scalar",
) -> LinearAttended:
    """Linear attention in time and memory linear in the number of tokens, with its log normaliser and state.

    Args:
        feature_map: "elu" (elu(x) + 1), "relu", "identity", or a function of tensors [..., d] -> [..., f].
        normalize: divide by the sum of the weights, which must not be negative; default: unless features are the
            identity.
        attn_mask: bool, True = attend; broadcasts against [*b, m, n]. A mask that differs between queries needs time,
            not memory, of size m x n. A key that it hides from all queries of the call does not enter the state; a key
            that one of them sees does, and later calls see it.
        is_causal: a query sees the keys up to its own position; the queries are the last m keys.
        scale: factor of the weights, by default 1 / sqrt(d). With normalisation it must be positive, and
            does not change the output.
        state: that of earlier keys, which every query sees; with one token at a time this is the recurrent form.
        statistics: "none" leaves out the log normaliser.

    Law: tests/laws/test_linear_attention_is_a_sum.py.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 50, 8, dtype=torch.float64)
    >>> whole, state = linear_attend(q, k, v, is_causal=True), None
    >>> steps = []
    >>> for t in range(50):
    ...     step = linear_attend(*(x[:, t : t + 1] for x in (q, k, v)), is_causal=True, state=state)
    ...     state, steps = step.state, [*steps, step.output]
    >>> torch.allclose(torch.cat(steps, 1), whole.output)
    True
    """
    phi = _feature_map(feature_map)
    normalize = feature_map != "identity" if normalize is None else normalize
    with autocast_disabled(query):
        parts = operands("linear_attend", query, key, value)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        _check(attn_mask, statistics, factor, normalize=normalize)
        q, k = phi(parts.query), phi(parts.key)
        if normalize:
            companion: Tensor | None = parts.value.new_ones(*parts.value.shape[:-1], 1)
        else:
            companion = k if statistics == "scalar" else None
        values = parts.value if companion is None else torch.cat((parts.value, companion), -1)
        before = (
            None
            if state is None
            else _joined(state, parts, k.shape[-1], normalize=normalize, with_moments=companion is not None)
        )
        sums, after = _sums(parts, q, k, values, before, attn_mask, is_causal=is_causal)
        v = parts.value.shape[-1]
        output, rest = sums[..., :v], sums[..., v:]
        G = None
        if normalize:
            alive = rest > 0
            output = torch.where(alive, output / torch.where(alive, rest, 1.0), 0.0)
            if statistics == "scalar":
                mass = torch.where(alive, factor * rest, 1.0).log().squeeze(-1)
                G = parts.restored(mass.masked_fill(~alive.squeeze(-1), -torch.inf))
        else:
            output = factor * output
            if statistics == "scalar":
                G = parts.restored(factor / 2 * (q * rest).sum(-1))
        return LinearAttended(parts.restored(output).to(query.dtype), G, _state(after, v, parts, normalize=normalize))


def _sums(
    parts: Operands,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    before: Tensor | None,
    attn_mask: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Sums over the visible keys of <q, k_n> values_n, and the state after all keys."""
    mask = masks.sight(attn_mask, None, None, lead=parts.batch, size=parts.size, like=parts.query).mask
    if mask is not None:  # keys that no query sees are in no sum, whatever the shape of the mask
        hidden = ~mask.any(-2, keepdim=True).transpose(-2, -1)
        k, values = k.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
    if mask is not None and mask.shape[-2] > 1:
        sums = _masked(q, k, values, mask, is_causal=is_causal)
        after = k.mT @ values
        return (sums, after) if before is None else (sums + q @ before, after + before)
    if is_causal:
        return _causal(q, k, values, before)
    after = k.mT @ values if before is None else before + k.mT @ values
    return q @ after, after


def _causal(q: Tensor, k: Tensor, values: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal sums: inside a chunk by products of all pairs, before it by the state."""
    m, n = q.shape[-2], k.shape[-2]
    start = k.new_zeros(*k.shape[:-2], k.shape[-1], values.shape[-1]) if before is None else before
    if n > m:  # keys before the first query
        start = start + k[..., : n - m, :].mT @ values[..., : n - m, :]
        k, values = k[..., n - m :, :], values[..., n - m :, :]
    elif m > n:  # queries before the first key
        k, values = (pad(t, (0, 0, m - n, 0)) for t in (k, values))
    chunks = max(1, -(-m // CHUNK))
    size = max(1, min(CHUNK, m))
    q_c, k_c, v_c = (pad(t, (0, 0, 0, chunks * size - m)).unflatten(-2, (chunks, size)) for t in (q, k, values))
    after = start.unsqueeze(-3) + (k_c.mT @ v_c).cumsum(-3)
    states = torch.cat((start.unsqueeze(-3), after[..., :-1, :, :]), -3)
    sums = q_c @ states + (q_c @ k_c.mT).tril() @ v_c
    return sums.flatten(-3, -2)[..., :m, :], after[..., -1, :, :]


def _masked(q: Tensor, k: Tensor, values: Tensor, mask: Tensor, *, is_causal: bool) -> Tensor:
    """Sums over the pairs that a mask allows, by blocks of queries."""
    m, n = q.shape[2], k.shape[2]
    at = torch.arange(n - m, n, device=q.device)

    def block(q: Tensor, mask: Tensor, at: Tensor, k: Tensor, values: Tensor) -> Tensor:
        weights = q.movedim(0, 2) @ k.mT
        visible = mask.movedim(0, 2)
        if is_causal:
            visible = visible & (torch.arange(k.shape[2], device=at.device) <= at.unsqueeze(-1))
        return (weights.masked_fill(~visible, 0.0) @ values).movedim(2, 0)

    rows = q.movedim(2, 0), mask.movedim(2, 0), at
    return rowwise(block, rows, (k, values), width=q.shape[0] * q.shape[1] * n).movedim(0, 2)


def _joined(state: LinearState, parts: Operands, f: int, *, normalize: bool, with_moments: bool) -> Tensor:
    """The state of earlier keys as one matrix, [b, h, f, columns]."""
    expected = (*parts.lead, f, parts.value.shape[-1])
    if state.memory.shape != expected:
        problem = f"state must have a memory of shape {expected}, got shape {shape_of(state.memory)}"
        remedy = "Pass the state of a call with the same batch, heads, features and size of values."
        raise InputValueError("linear_attend", "state", problem, remedy)
    companion = state.mass if normalize else state.moments if with_moments else None
    if companion is None and (normalize or with_moments):
        missing = "mass" if normalize else "moments"
        remedy = "Pass the state of a call with the same normalize and statistics."
        raise InputValueError("linear_attend", "state", f"state must have {missing}, but it is None", remedy)
    matrix = (
        state.memory
        if companion is None
        else torch.cat((state.memory, companion.unsqueeze(-1) if normalize else companion), -1)
    )
    return matrix.to(parts.query.dtype).reshape(*parts.query.shape[:2], *matrix.shape[-2:])


def _state(after: Tensor, v: int, parts: Operands, *, normalize: bool) -> LinearState:
    memory, rest = parts.restored(after[..., :v]), after[..., v:]
    if normalize:
        return LinearState(memory, mass=parts.restored(rest.squeeze(-1)))
    return LinearState(memory, moments=parts.restored(rest) if rest.shape[-1] else None)


def _feature_map(feature_map: str | FeatureMap) -> FeatureMap:
    if callable(feature_map):
        return feature_map
    if feature_map not in FEATURE_MAPS:
        remedy = "Use one of these, or a function of tensors [..., d]."
        condition = f"feature_map must be one of {', '.join(FEATURE_MAPS)}"
        raise InputValueError("linear_attend", "feature_map", f"{condition}, got {feature_map!r}", remedy)
    return FEATURE_MAPS[feature_map]


def _check(attn_mask: Tensor | None, statistics: str, scale: float, *, normalize: bool) -> None:
    if attn_mask is not None and (not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool):
        fact = f"{attn_mask.dtype}" if isinstance(attn_mask, Tensor) else type(attn_mask).__name__
        problem = f"attn_mask must be a bool tensor, since linear attention has no logits to add to, got {fact}"
        raise InputTypeError("linear_attend", "attn_mask", problem, "Pass mask.bool(), True = attend.")
    if statistics not in ("none", "scalar"):
        condition, remedy = 'statistics must be "none" or "scalar"', "Leave it out for the log normaliser."
        raise InputValueError("linear_attend", "statistics", f"{condition}, got {statistics!r}", remedy)
    if normalize and not scale > 0:
        problem = f"scale must be positive with normalisation, which divides by the sum of the weights, got {scale}"
        raise InputValueError("linear_attend", "scale", problem, "Pass a positive scale, or normalize=False.")
