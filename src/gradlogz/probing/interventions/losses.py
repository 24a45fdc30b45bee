"""The loss of a model on a batch, by the kind of the model.

    next token       causal models with a language-model head: -log p(token i + 1), nats per token
    masked token     other models with such a head: -log p of tokens that are masked in the input, nats per token
    representation   models without a head: 1 - cos of the final representation of a token with that of the unedited
                     model; a distance, which shows that something changes and not whether it becomes worse

A hash of the token decides whether it is masked, so that the masks do not depend on batches and are the same in every
pass.

Read next: run_interventions.py.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from ..._errors import InputValueError
from ..._typing import Bool, Float, Int, Tensor
from ..corpus.batching import Batch
from ..inside.hooks import evaluation_mode, without_cache
from ..statistics import token_hashes

MASKED = 0.15  # share of the tokens that are masked
ROUNDING = 1e-4  # relative change of a prefix, by a later token, that counts as rounding

Kind = Literal["next token", "masked token", "representation"]


class Task(NamedTuple):
    """A batch as a model reads it, and the tokens on which it is scored.

    inputs: arguments of the model. targets: token ids to predict; None for representations. scored: which tokens count.
    """

    inputs: dict[str, Tensor]
    targets: Int[Tensor, "b n"] | None
    scored: Bool[Tensor, "b n"]


def kind_of(model: nn.Module, tokenizer: Any, batch: Batch) -> Kind:
    """Return the kind of loss of a model; causality is tested by a change of the last token of a short text."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        problem = "the model is an encoder-decoder; losses are known for encoders and for decoders"
        raise InputValueError("intervene", "model", problem, "Pass its encoder or its decoder.")
    ids = batch.inputs["input_ids"][:1, :16]
    changed = ids.clone()
    changed[:, -1] = torch.where(ids[:, -1] == ids[:, 0], (ids[:, 0] == 0).long(), ids[:, 0])  # another token
    with torch.no_grad(), evaluation_mode(model):
        one, other = (model(input_ids=each, **without_cache(model)) for each in (ids, changed))
    logits = getattr(one, "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[:2] != ids.shape or int(ids.max()) >= logits.shape[2]:
        return "representation"
    difference = (other.logits - logits)[:, :-1].abs().max()
    if float(difference) <= ROUNDING * float(logits.abs().max()):
        return "next token"
    return "representation" if getattr(tokenizer, "mask_token_id", None) is None else "masked token"


def task_of(kind: Kind, batch: Batch, tokenizer: Any) -> Task:
    """Return the inputs, targets and scored tokens of a batch."""
    ids, real = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
    if kind == "representation":
        return Task(batch.inputs, None, real)
    if kind == "next token":
        scored = real & real.roll(-1, 1)
        scored[:, -1] = False
        return Task(batch.inputs, ids.roll(-1, 1), scored)
    positions = batch.starts.to(ids.device).unsqueeze(-1) + torch.arange(ids.shape[1], device=ids.device)
    special = torch.tensor(getattr(tokenizer, "all_special_ids", []), device=ids.device, dtype=ids.dtype)
    drawn = token_hashes(batch.keys.to(ids.device), positions).double() < MASKED * 2.0**63
    masked = drawn & real & ~torch.isin(ids, special)
    return Task({**batch.inputs, "input_ids": ids.masked_fill(masked, tokenizer.mask_token_id)}, ids, masked)


def representation_of(output: Any) -> Float[Tensor, "b n D"]:
    """Return the final representations of the tokens."""
    hidden = getattr(output, "last_hidden_state", None)
    hidden = getattr(output, "logits", output) if hidden is None else hidden
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        problem = f"the model returns {type(output).__name__} without token logits or last_hidden_state [b, n, D]"
        raise InputValueError("intervene", "model", problem, "Pass a model that returns representations of its tokens.")
    return hidden


def loss_of(task: Task, output: Any, reference: Tensor | None) -> Float[Tensor, " b"]:
    """Return the loss of each row, summed over its scored tokens; reference: representations of the unedited model."""
    if task.targets is None:
        hidden = representation_of(output).double()
        reference = hidden if reference is None else reference
        losses = (1 - cosine_similarity(hidden, reference, dim=-1)).clamp(min=0.0)  # rounding
    else:
        # One sequence at a time: all at once would copy the logits.
        pairs = zip(output.logits, task.targets, strict=True)
        losses = torch.stack([cross_entropy(row.float(), ids, reduction="none") for row, ids in pairs]).double()
    return torch.where(task.scored, losses, 0.0).sum(1)
