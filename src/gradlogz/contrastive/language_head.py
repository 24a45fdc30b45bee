"""Cross-entropy of a language-model head: the candidates are the vocabulary, the anchors the hidden states.

    h        = sum_j exp(b_j) delta_{w_j}          the words, a measure
    G(h_t)   = log sum_j exp(<h_t, w_j> + b_j)     log normaliser of a token
    loss_t   = G(h_t) - <h_t, w_y> - b_y           -log of the probability of the label

A head of 128 000 words over 8192 tokens has 4 GB of logits in float32. They are computed by blocks of tokens and not
stored; the gradients of the loss come from the same blocks.

Read next: ../kernels/losses/vocabulary.py (the blocks), losses/ (`proxy_loss`, the same loss for few classes).
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import distributed

from .._autocast import without_autocast
from .._errors import InputValueError
from .._typing import Bool, Float, Int, Tensor
from ..kernels.losses.logit_losses import is_special
from ..kernels.losses.vocabulary import Head, LinearCrossEntropyFunction, vocabulary_operator
from .distributed import announcing, await_checks, check_started, sizes_of_batches
from .validation import (
    REDUCTIONS,
    check_choice,
    check_integers,
    check_numbers,
    check_positive,
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
    call, head = (
        "linear_cross_entropy",
        Head(0, 0, softcap, label_smoothing, z_loss, group, group is not None, precision),
    )
    operands = call, hidden, weight, labels, bias, ignore_index, reduction, first_word
    if group is None:
        flat, targets, ignored, head = _checked(*operands, head)
    else:
        check_started(call)
        with announcing(group, weight):
            flat, targets, ignored, head = _checked(*operands, head)
            await_checks(group, weight)
    h, w, *rest = promoted(flat, weight, *(() if bias is None else (bias,)))
    b = rest[0] if rest else None
    counted = (~ignored).to(h.dtype)
    coefficients = counted / counted.sum().clamp(min=1) if reduction == "mean" else counted
    if is_special(h, w, b) and group is None:
        settings = h, w, b, targets, coefficients, softcap, label_smoothing, z_loss, precision
        total, losses, log_normalizer, entropy = vocabulary_operator(*settings)[:4]
    else:
        total, losses, log_normalizer, entropy = LinearCrossEntropyFunction.apply(h, w, b, targets, coefficients, head)
    shape = labels.shape
    loss = torch.where(ignored, 0.0, losses).reshape(shape) if reduction == "none" else total
    return LinearCrossEntropy(loss, log_normalizer.reshape(shape), entropy.reshape(shape))


def _checked(
    call: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    first_word: int | None,
    head: Head,
) -> tuple[Float[Tensor, "t d"], Int[Tensor, " t"], Bool[Tensor, " t"], Head]:
    """Hidden states and labels of tokens, which are ignored, and the head with its number of words; all checked."""
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
        remedy = "Pass one number for each word."
        check_numbers(call, "bias", bias, (weight.shape[0],), remedy, weight=weight)
    check_choice(call, "reduction", reduction, REDUCTIONS)
    _check_settings(call, head, torch.float64 in {t.dtype for t in (hidden, weight, bias) if t is not None})
    words, first = weight.shape[0], 0
    if head.group is not None:
        sizes = sizes_of_batches(weight, head.group)
        words, first = sum(sizes), sum(sizes[: distributed.get_rank(head.group)])
    elif first_word is not None:
        problem = "first_word needs the group over which the vocabulary is divided"
        raise InputValueError(call, "first_word", problem, "Pass group=torch.distributed.group.WORLD, or drop it.")
    ignored = labels.reshape(-1) == ignore_index
    targets = labels.reshape(-1).long().masked_fill(ignored, 0)
    if readable(targets) and targets.numel() and not bool(((targets >= 0) & (targets < words)).all()):
        fact = f"labels from {int(targets.min())} to {int(targets.max())}"
        remedy = f"Use labels from 0 to {words - 1}, or ignore_index={ignore_index}."
        raise InputValueError(call, "labels", f"labels must be words of the {words} in weight, got {fact}", remedy)
    return flat, targets, ignored, head._replace(words=words, first=first if first_word is None else first_word)


def _check_settings(call: str, head: Head, is_double: bool) -> None:
    """Check the numbers and the precision of a head."""
    for name, value in (("z_loss", head.z_loss), ("label_smoothing", head.smoothing)):
        if not 0 <= value < math.inf:
            problem = f"{name} must be finite and not negative, got {value}"
            raise InputValueError(call, name, problem, "Drop it to leave it out.")
    if head.smoothing > 1:
        problem = f"label_smoothing must be at most 1, got {head.smoothing}"
        raise InputValueError(call, "label_smoothing", problem, "Pass the share of the target that is spread.")
    if head.softcap is not None:
        check_positive(call, softcap=head.softcap)
    if head.precision not in (None, torch.bfloat16):
        problem = f"precision must be torch.bfloat16, got {head.precision}"
        raise InputValueError(call, "precision", problem, "Drop it to use the dtype of the hidden states.")
    if head.precision is not None and is_double:
        problem = "precision is for operands of at most 32 bits, got torch.float64"
        raise InputValueError(call, "precision", problem, "Drop it, or convert hidden and weight to float32.")
