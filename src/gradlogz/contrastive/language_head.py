"""Cross-entropy of a language-model head: the candidates are the vocabulary, the anchors the hidden states.

    h        = sum_j exp(b_j) delta_{w_j}          the words, a measure
    G(h_t)   = log sum_j exp(<h_t, w_j> + b_j)     log normaliser of a token
    loss_t   = G(h_t) - <h_t, w_y> - b_y           -log of the probability of the label

A head of 128 000 words over 8192 tokens has 4 GB of logits in float32. They are computed by blocks of tokens and not
stored; the gradients of the loss come from the same blocks.

Read next: ../kernels/losses/vocabulary.py (the blocks), losses/ (`proxy_loss`, the same loss for few classes).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import distributed

from .._autocast import without_autocast
from .._errors import InputRuntimeError, InputValueError, shape_of
from .._typing import Float, Int, Tensor
from ..kernels.losses.logit_losses import is_special
from ..kernels.losses.vocabulary import Head, LinearCrossEntropyFunction, vocabulary_operator
from .validation import (
    REDUCTIONS,
    check_choice,
    check_device,
    check_integers,
    check_vectors,
    promoted,
    readable,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LinearCrossEntropy(NamedTuple):
    """Result of `linear_cross_entropy`; all fields are differentiable.

    Attributes:
        loss: mean or sum over the tokens whose label is not ignored, or the loss of every token, 0 where ignored.
        log_normalizer: G of every token.
        entropy: Shannon entropy of the predicted distribution of every token, in nats.
    """

    loss: Tensor
    log_normalizer: Float[Tensor, "*b"]
    entropy: Float[Tensor, "*b"]


@without_autocast
def linear_cross_entropy(
    hidden: Float[Tensor, "*b d"],
    weight: Float[Tensor, "v d"],
    labels: Int[Tensor, "*b"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    precision: torch.dtype | None = None,
    reduction: str = "mean",
    group: "ProcessGroup | None" = None,
    first_word: int | None = None,
) -> LinearCrossEntropy:
    """Cross-entropy of the logits hidden @ weight.T + bias, without storing them.

        loss_t = (1 - e) (G - s_y) + e (G - mean_j s_j) + z G²,   s = softcap tanh((<h_t, w> + b) / softcap)

    Denominator: all words, including the label. Computed in float32 at least unless there is a half `precision`; first
    derivatives only. Memory: the gradients and a block of logits of at most 128 tokens or 2^20 logits on a CPU.

    Args:
        labels: index of the word of each token, or `ignore_index`.
        softcap: bound of the logits, as in Gemma 2.
        label_smoothing: e, the share of the target that is spread over all words, as in torch's cross_entropy.
        z_loss: z, the weight of the square of the log normaliser, which keeps it near 0.
        precision: torch.bfloat16 for the operands of the three products, whose sums are float32. In float16 most slopes
            of a mean over many tokens would be 0.
        reduction: "mean" over tokens that are not ignored (0 if all are), "sum" or "none".
        group: process group over which the vocabulary is divided. Every process passes all tokens and its own rows of
            `weight` and `bias`, in the order of ranks; all receive the same loss and the whole gradient of `hidden`.
        first_word: index of the first word of this process; the sum of the words of lower ranks if not passed.

    >>> import torch
    >>> hidden, weight, labels = torch.randn(2, 3, 8), torch.randn(50, 8), torch.randint(50, (2, 3))
    >>> result = linear_cross_entropy(hidden, weight, labels)
    >>> logits = hidden @ weight.mT
    >>> torch.allclose(result.loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    True
    >>> torch.allclose(result.log_normalizer, logits.logsumexp(-1))
    True
    """
    call = "linear_cross_entropy"
    flat = _checked(call, hidden, weight, labels, bias)
    check_choice(call, "reduction", reduction, REDUCTIONS)
    if precision not in (None, torch.bfloat16):
        problem = f"precision must be torch.bfloat16, got {precision}"
        raise InputValueError(call, "precision", problem, "Drop it to use the dtype of the hidden states.")
    for name, value in (("softcap", softcap), ("z_loss", z_loss), ("label_smoothing", label_smoothing)):
        if value is not None and not (value > 0 if name == "softcap" else value >= 0):
            raise InputValueError(call, name, f"{name} must be positive, got {value}", "Drop it to leave it out.")
    if label_smoothing > 1:
        problem = f"label_smoothing must be at most 1, got {label_smoothing}"
        raise InputValueError(call, "label_smoothing", problem, "Pass the share of the target that is spread.")
    words, first = weight.shape[0], 0
    if group is not None or first_word is not None:
        words, first = _words_of_all(call, weight, group, first_word)
    ignored = labels.reshape(-1) == ignore_index
    targets = labels.reshape(-1).long().masked_fill(ignored, 0)
    if readable(targets) and targets.numel() and not bool(((targets >= 0) & (targets < words)).all()):
        fact = f"labels from {int(targets.min())} to {int(targets.max())}"
        remedy = f"Use labels from 0 to {words - 1}, or ignore_index={ignore_index}."
        raise InputValueError(call, "labels", f"labels must be words of the {words} in weight, got {fact}", remedy)
    h, w, *rest = promoted(flat, weight, *(() if bias is None else (bias,)))
    b = rest[0] if rest else None
    if precision is not None and h.dtype is torch.float64:
        problem = "precision is for operands of at most 32 bits, got torch.float64"
        raise InputValueError(call, "precision", problem, "Drop it, or convert hidden and weight to float32.")
    counted = (~ignored).to(h.dtype)
    coefficients = counted / counted.sum().clamp(min=1) if reduction == "mean" else counted
    if is_special(h, w, b) and group is None:
        operands = (h, w, b, targets, coefficients, softcap, label_smoothing, z_loss, precision)
        total, losses, log_normalizer, entropy = vocabulary_operator(*operands)[:4]
    else:
        head = Head(words, first, softcap, label_smoothing, z_loss, group, group is not None, precision)
        total, losses, log_normalizer, entropy = LinearCrossEntropyFunction.apply(h, w, b, targets, coefficients, head)
    shape = labels.shape
    loss = torch.where(ignored, 0.0, losses).reshape(shape) if reduction == "none" else total
    return LinearCrossEntropy(loss, log_normalizer.reshape(shape), entropy.reshape(shape))


def _checked(call: str, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Float[Tensor, "t d"]:
    """Hidden states as [t, d], after the checks."""
    if isinstance(hidden, Tensor) and hidden.ndim != 2:
        if hidden.ndim == 0:
            problem = "hidden must be [*b, d], got shape ()"
            raise InputValueError(call, "hidden", problem, "Pass the hidden states of the last layer.")
        flat = hidden.reshape(-1, hidden.shape[-1])
    else:
        flat = hidden
    check_vectors(call, hidden=flat, weight=weight)
    check_integers(call, "labels", labels, tuple(hidden.shape[:-1]), hidden)
    if bias is not None:
        if tuple(bias.shape) != (weight.shape[0],):
            problem = f"bias must have shape ({weight.shape[0]},), got {shape_of(bias)}"
            raise InputValueError(call, "bias", problem, "Pass one number for each word.")
        check_device(call, weight=weight, bias=bias)
    return flat


def _words_of_all(call: str, weight: Tensor, group: "ProcessGroup | None", first_word: int | None) -> tuple[int, int]:
    """Number of words on all processes, and the first word of this one."""
    if group is None or not (distributed.is_available() and distributed.is_initialized()):
        problem = "group must be a process group if the vocabulary is divided"
        remedy = "Call torch.distributed.init_process_group first and pass torch.distributed.group.WORLD."
        raise InputRuntimeError(call, "group", problem, remedy)
    local = torch.tensor([weight.shape[0]], device=weight.device)
    sizes = [torch.empty_like(local) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(sizes, local, group=group)
    numbers = [int(size) for size in sizes]
    before = sum(numbers[: distributed.get_rank(group)])
    return sum(numbers), before if first_word is None else first_word
