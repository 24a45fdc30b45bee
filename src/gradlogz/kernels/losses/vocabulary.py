"""Cross-entropy of a linear layer over a vocabulary, by blocks of tokens: the logits are never stored together.

    u_tj = <h_t, w_j> + b_j,   s = softcap tanh(u / softcap)                       logits
    G    = log sum_j exp s_j,  p = exp(s - G),   H = G - sum_j p_j s_j            log normaliser and entropy of a token
    loss = (1 - e) softplus(N - s_y) + e (G - mean_j s_j) + z G²                  e label smoothing, z the z-loss
    dloss/ds_j = (1 - e) (p_j - [j = y]) + e (p_j - 1/v) + 2 z G p_j
    dH/ds_j    = -p_j (log p_j + H)

N is the log-sum-exp over all words but the label, as in softmax_losses.py. The loss is summed with known coefficients
of the tokens, so that its gradients come from the same blocks as its value; cotangents of single tokens (losses, G, H)
need a second pass. The vocabulary may be divided over processes: maxima and sums of a block are then reduced over them.

Read next: ../../contrastive/language_head.py.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed

from ..._autocast import autocast_disabled
from ..._typing import Float, Int, Tensor
from ..attention.blocked import logits_at_once
from .float32_products import HALVES, add_product
from .softmax_losses import softplus

# A block has at least so many tokens, since each block reads all weights.
TOKENS = 128
# A logit so far below the largest one has no mass: its exponential is 0 in float64 too.
NO_MASS = -1e4


class Head(NamedTuple):
    """Settings of the loss: number of words on all processes, first word of this one, and the process group.

    With a half `precision`, hidden states, weights and slopes are rounded to it before they are multiplied.
    """

    words: int
    first: int
    softcap: float | None
    smoothing: float
    z_loss: float
    group: Any = None
    divided: bool = False
    precision: torch.dtype | None = None


class Tokens(NamedTuple):
    """Loss, log normaliser and entropy of every token."""

    loss: Float[Tensor, " t"]
    log_normalizer: Float[Tensor, " t"]
    entropy: Float[Tensor, " t"]


class _Block(NamedTuple):
    """A block of tokens: logits, softmax, and the parts of the loss."""

    s: Tensor
    p: Tensor
    label: Tensor  # local index of the label of each token, clamped
    here: Tensor  # True if the label is on this process
    share: Tensor  # probability of all words but the label
    tokens: Tokens


def evaluate(
    hidden: Float[Tensor, "t d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    labels: Int[Tensor, " t"],
    coefficients: Float[Tensor, " t"],
    head: Head,
    gradients: bool,
) -> tuple[Tokens, list[Tensor]]:
    """Loss, log normaliser and entropy of all tokens, and the gradients of the sum of coefficient times loss."""
    result = Tokens(*(hidden.new_empty(hidden.shape[0]) for _ in range(3)))
    zeros = _zeros(hidden, weight, bias) if gradients else []
    hidden, weight = _rounded(hidden, head), _rounded(weight, head)
    for rows in _blocks(hidden, weight):
        block = _block(hidden[rows], weight, bias, labels[rows], head)
        for everything, part in zip(result, block.tokens, strict=True):
            everything[rows] = part
        if gradients:
            slope = _loss_slope(block, block.p, coefficients[rows], head)
            _add(zeros, rows, hidden, weight, bias, _uncapped(block, slope, head))
    return result, _reduced(zeros, head)


def pull_back(
    hidden: Float[Tensor, "t d"],
    weight: Float[Tensor, "v d"],
    bias: Float[Tensor, " v"] | None,
    labels: Int[Tensor, " t"],
    cotangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    head: Head,
) -> list[Tensor]:
    """Gradients from cotangents of the loss, log normaliser and entropy of every token; blocks are recomputed."""
    zeros = _zeros(hidden, weight, bias)
    hidden, weight = _rounded(hidden, head), _rounded(weight, head)
    for rows in _blocks(hidden, weight):
        block = _block(hidden[rows], weight, bias, labels[rows], head)
        loss, log_normalizer, entropy = (None if c is None else c[rows] for c in cotangents)
        slope = torch.zeros_like(block.p) if loss is None else _loss_slope(block, block.p.clone(), loss, head)
        if log_normalizer is not None:
            slope += block.p * log_normalizer.unsqueeze(-1)
        if entropy is not None:
            curved = torch.special.entr(block.p) - block.p * block.tokens.entropy.unsqueeze(-1)
            slope += curved * entropy.unsqueeze(-1)
        _add(zeros, rows, hidden, weight, bias, _uncapped(block, slope, head))
    return _reduced(zeros, head)


def _blocks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(TOKENS, logits_at_once(hidden.device) // max(1, weight.shape[0]))
    for first in range(0, hidden.shape[0], size):
        yield slice(first, first + size)


def _block(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> _Block:
    """Logits and softmax of a block of tokens."""
    s = _product(hidden, weight.mT)
    if bias is not None:
        s += bias
    if head.softcap is not None:
        s = s.div_(head.softcap).tanh_().mul_(head.softcap)
    local = labels - head.first
    here = (local >= 0) & (local < weight.shape[0])
    label = local.clamp(0, max(0, weight.shape[0] - 1)).unsqueeze(-1)
    s_label = s.gather(1, label).squeeze(1).masked_fill(~here, 0.0)
    total_logit = s.sum(-1) if head.smoothing else None
    without = s.gather(1, label).masked_fill(here.unsqueeze(-1), -torch.inf)
    # Logits are read again where the slope of a soft cap is computed.
    others = s.scatter_(1, label, without) if head.softcap is None else s.scatter(1, label, without)
    top = others.amax(-1)
    top = _over_processes(top, head, distributed.ReduceOp.MAX if head.divided else None)
    top = top.masked_fill(top == -torch.inf, 0.0)
    below = others.sub_(top.unsqueeze(-1)).clamp_(min=NO_MASS)
    p = below.exp()
    sums = [p.sum(-1), -below.mul_(p).sum(-1), s_label]  # -sum p log p, 0 for a word without mass
    if total_logit is not None:
        sums.append(total_logit)
    sums = list(_over_processes(torch.stack(sums), head, distributed.ReduceOp.SUM if head.divided else None))
    z, unnormalized, s_label = sums[:3]
    N = top + z.log()
    behind = N - s_label
    nll, share = softplus(behind), behind.sigmoid()
    G = nll + s_label
    # H = -sum p log p = sum over the others of p_j (G - s_j) + p_y (G - s_y), both nonnegative
    scale = share / z.clamp(min=torch.finfo(z.dtype).tiny)
    H = share * (G - top) + scale * unnormalized + (1 - share) * nll
    loss = nll
    if head.smoothing:
        loss = (1 - head.smoothing) * nll + head.smoothing * (G - sums[3] / head.words)
    if head.z_loss:
        loss = loss + head.z_loss * G.square()
    p *= scale.unsqueeze(-1)
    p.scatter_(1, label, torch.where(here, 1 - share, p.gather(1, label).squeeze(1)).unsqueeze(-1))
    return _Block(s, p, label, here, share, Tokens(loss, G, H))


def _loss_slope(block: _Block, p: Tensor, coefficients: Tensor, head: Head) -> Tensor:
    """Coefficient times the derivative of the loss in the logits, which overwrites the softmax `p`."""
    factor = coefficients * (1 + 2 * head.z_loss * block.tokens.log_normalizer) if head.z_loss else coefficients
    slope = p.mul_(factor.unsqueeze(-1))
    # p_y - 1 = -(probability of the other words), which keeps its digits
    smoothing = head.smoothing
    at_label = coefficients * (smoothing * (1 - block.share) - (1 - smoothing) * block.share)
    if head.z_loss:
        at_label = at_label + coefficients * 2 * head.z_loss * block.tokens.log_normalizer * (1 - block.share)
    elsewhere = slope.gather(1, block.label).squeeze(1)
    slope.scatter_(1, block.label, torch.where(block.here, at_label, elsewhere).unsqueeze(-1))
    if smoothing:
        slope -= (coefficients * smoothing / head.words).unsqueeze(-1)
    return slope


def _uncapped(block: _Block, slope: Tensor, head: Head) -> Tensor:
    """Derivative in the products before the soft cap."""
    if head.softcap is None:
        return slope
    return slope.mul_(1 - (block.s / head.softcap).square())


def _zeros(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    return [torch.zeros_like(t) for t in (hidden, weight, bias) if t is not None]


def _add(grads: list[Tensor], rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, slope: Tensor) -> None:
    if bias is not None:
        grads[2].add_(slope.sum(0))
    slope = slope.to(weight.dtype)
    add_product(grads[0][rows], slope, weight, beta=0.0)
    add_product(grads[1], slope.mT, hidden[rows])


def _rounded(tensor: Tensor, head: Head) -> Tensor:
    return tensor if head.precision is None else tensor.to(head.precision)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Product of matrices, in float32 for operands in half precision."""
    dtype = torch.float32 if a.dtype in HALVES else a.dtype
    return add_product(torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device), a, b, beta=0.0)


def _over_processes(tensor: Tensor, head: Head, operation: Any) -> Tensor:
    if head.divided:
        tensor = tensor.contiguous()
        distributed.all_reduce(tensor, operation, group=head.group)
    return tensor


def _reduced(grads: list[Tensor], head: Head) -> list[Tensor]:
    """Gradients, that of the hidden states summed over the parts of the vocabulary."""
    if grads:
        _over_processes(grads[0], head, distributed.ReduceOp.SUM if head.divided else None)
    return grads


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Sum of coefficient times loss, and loss, log normaliser and entropy of every token."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, coefficients: Tensor, head: Head
    ) -> tuple[Tensor, ...]:
        tokens, grads = evaluate(hidden, weight, bias, labels, coefficients, head, any(ctx.needs_input_grad[:3]))
        ctx.head, ctx.number = head, len(grads)
        ctx.save_for_backward(hidden, weight, bias, labels, *grads)
        ctx.set_materialize_grads(False)
        return (tokens.loss * coefficients).sum(), *tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, total: Tensor | None, loss: Tensor | None, log_normalizer: Tensor | None, entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, *grads = ctx.saved_tensors
        with autocast_disabled(hidden):
            result = [] if total is None else [g * total for g in grads]
            if not (loss is log_normalizer is entropy is None):
                more = pull_back(hidden, weight, bias, labels, (loss, log_normalizer, entropy), ctx.head)
                result = [a + b for a, b in zip(result, more, strict=True)] if result else more
        rest = [None] * (3 - len(result))
        return *result, *rest, None, None, None


# Under torch.compile the same functions are operators, so that logits are not stored there either -------------------

Optional = Tensor | None


@torch.library.custom_op("gradlogz::vocabulary", mutates_args=())
def vocabulary_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coefficients: Tensor,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    precision: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sum of the loss, its parts of every token, and gradients of the sum in hidden, weight and bias."""
    head = Head(weight.shape[0], 0, softcap, smoothing, z_loss, precision=precision)
    tokens, grads = evaluate(hidden, weight, bias, labels, coefficients, head, True)
    grad_bias = grads[2] if bias is not None else weight.new_empty(0)
    return (tokens.loss * coefficients).sum(), *tokens, grads[0], grads[1], grad_bias


@vocabulary_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coefficients: Tensor,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    precision: torch.dtype | None,
) -> tuple[Tensor, ...]:
    del labels, softcap, smoothing, z_loss, precision
    per_token = [torch.empty_like(coefficients) for _ in range(3)]
    grad_bias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return hidden.new_empty(()), *per_token, torch.empty_like(hidden), torch.empty_like(weight), grad_bias


@torch.library.custom_op("gradlogz::vocabulary_backward", mutates_args=())
def vocabulary_backward_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    loss: Tensor | None,
    log_normalizer: Tensor | None,
    entropy: Tensor | None,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    precision: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from cotangents of single tokens."""
    head = Head(weight.shape[0], 0, softcap, smoothing, z_loss, precision=precision)
    grads = pull_back(hidden, weight, bias, labels, (loss, log_normalizer, entropy), head)
    return grads[0], grads[1], grads[2] if bias is not None else weight.new_empty(0)


@vocabulary_backward_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    loss: Tensor | None,
    log_normalizer: Tensor | None,
    entropy: Tensor | None,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    precision: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    del labels, loss, log_normalizer, entropy, softcap, smoothing, z_loss, precision
    grad_bias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, labels, _, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, labels, *output[4:])


def _differentiate(ctx: Any, total: Optional, *cotangents: Optional) -> tuple[Optional, ...]:
    hidden, weight, bias, labels, *grads = ctx.saved_tensors
    result: list[Tensor] = [] if total is None else [g * total for g in grads]
    if any(c is not None for c in cotangents[:3]):
        more = vocabulary_backward_operator(hidden, weight, bias, labels, *cotangents[:3], *ctx.settings)
        result = [a + b for a, b in zip(result, more, strict=True)] if result else list(more)
    grad_hidden, grad_weight, grad_bias = result
    return grad_hidden, grad_weight, None if bias is None else grad_bias, *[None] * 6


vocabulary_operator.register_autograd(_differentiate, setup_context=_save)
