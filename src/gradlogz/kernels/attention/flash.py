"""torch's flash attention on the CPU: output, log normaliser, and the gradient of both.

    forward    output and log normaliser of the fused kernel behind scaled_dot_product_attention
    backward   ds = p (dp - delta),  delta = <grad_output, output>;  an additional column with v = 0, grad_output = 1
               and output = -c replaces torch's delta by any number c

It has neither windows nor segments nor soft caps, and no other statistics; `takes` checks the arguments.

Read next: dispatch.py.
"""

import torch
from torch.nn.functional import pad

from ..._typing import Float, Tensor
from .reference import Statistics
from .scoring import Scoring, Sight

# Log normaliser up to which a rounding error of a logit changes its weight by less than 3e-5.
LARGE = 256.0


def takes(query: Tensor, sight: Sight, scoring: Scoring, keys: int) -> bool:
    """Return whether torch computes the same function of these arguments.

    It aligns causal masks with the first key, applies them before a scale that must be positive, does not report rows
    that a causal mask together with another mask leaves without keys, and rounds a bias to the dtype of the query.
    """
    plain = sight.bias is None and sight.mask is None
    causal = scoring.right == 0 and query.shape[2] == keys and plain and scoring.scale > 0
    full_band = scoring.left is None and (scoring.right is None or causal)
    exact = sight.bias is None or sight.bias.dtype == query.dtype
    return (
        query.device.type == "cpu"
        and query.numel() > 0
        and full_band
        and exact
        and scoring.softcap is None
        and sight.segments is None
    )


def forward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
) -> Statistics:
    """Output and log normaliser; the other statistics are NaN."""
    v = value.shape[-1]
    additive = _additive(query, sight)
    output, G = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_equal_sizes(query, key, value), 0.0, scoring.right == 0, attn_mask=additive, scale=scoring.scale
    )
    unknown = query.isnan().any(-1)
    if additive is not None:  # torch returns 0 for a row without keys, and for one with NaN
        G = G.masked_fill((additive == -torch.inf).all(-1), -torch.inf)
        unknown = unknown | additive.isnan().any(-1)
    G, output = G.masked_fill(unknown, torch.nan), output.masked_fill(unknown.unsqueeze(-1), torch.nan)
    return Statistics(output[..., :v], G, *(torch.full_like(G, torch.nan) for _ in range(3)))


def differentiates(result: Statistics) -> bool:
    """Return whether the logits are small enough for `backward`, which rounds them otherwise than `forward`."""
    G = result.log_normalizer
    return bool((G.abs() < LARGE).logical_or_(G == -torch.inf).all())


def computed(result: Statistics) -> bool:
    """Return whether a result is one of `forward`, which computes no maximum."""
    return bool(result.max_logit.isnan().all())


def backward(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n v"],
    sight: Sight,
    scoring: Scoring,
    log_normalizer: Float[Tensor, "b h m"],
    grad_output: Float[Tensor, "b h m v"],
    c0: Float[Tensor, "b h m"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value for ds = p (dp + c0)."""
    (_, hk, _, d), v = key.shape, value.shape[-1]
    width = max(d, v + 1)
    # <grad_output, output> is -c0 for these two, independent of the true output.
    grad_output = pad(torch.cat([grad_output, torch.ones_like(grad_output[..., :1])], -1), (0, width - v - 1))
    output = torch.zeros_like(grad_output)
    output[..., v] = -c0
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_output,
        *(pad(t, (0, width - t.shape[-1])) for t in _equal_sizes(query, key, value)),
        output,
        log_normalizer,
        0.0,
        scoring.right == 0,
        attn_mask=_additive(query, sight),
        scale=scoring.scale,
    )
    grad_query, grad_key, grad_value = grads
    if hk != query.shape[1]:
        grad_key, grad_value = (t.unflatten(1, (hk, -1)).sum(2) for t in (grad_key, grad_value))
    return grad_query[..., :d], grad_key[..., :d], grad_value[..., :v]


def _equal_sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make heads and head sizes equal: otherwise torch chooses a path with quadratic memory."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    d, v = query.shape[-1], value.shape[-1]
    if d != v:
        query, key = (pad(t, (0, max(0, v - d))) for t in (query, key))
        value = pad(value, (0, max(0, d - v)))
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    return query, key, value


def _additive(query: Tensor, sight: Sight) -> Tensor | None:
    """Bias and mask as one additive mask, [#b, #h, m, n]."""
    additive = sight.bias
    if sight.mask is not None:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        additive = (zero if additive is None else additive).masked_fill(~sight.mask, -torch.inf)
    if additive is None:
        return None
    return additive.to(query.dtype).expand(-1, -1, query.shape[2], -1)
