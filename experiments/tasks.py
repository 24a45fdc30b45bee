"""Tasks: batches as functions of the seed and the step, a loss, and an evaluation.

    ModularAddition    (a, b, =) -> a + b mod p: every pair once, a fixed part of them for training   [power22]
    TextTask           windows of a text: the next token, or 15 % of the tokens, hidden by a mask

A batch depends on nothing but the seed and the step, so that a run that is resumed reads what it would have read.

Read next: training.py (the loop), text.py (where the text comes from).
"""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

HIDDEN_SHARE = 0.15  # of the tokens, with the masked objective


class Batch(NamedTuple):
    """Tokens [b, n], and targets [b, n] with -100 where nothing is predicted; for series both are numbers [b, n, o]."""

    tokens: Tensor
    targets: Tensor


class Task(Protocol):
    """A task of the training loop."""

    def batch(self, seed: int, step: int) -> Batch:
        """Batch of one step of a run."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Quantity that training decreases."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Quantities on data that are not trained on, and any statistics of the model."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the predicted tokens, in nats."""
    return cross_entropy(model(batch.tokens).flatten(0, -2).float(), batch.targets.flatten(), ignore_index=-100)


def generator_of(seed: int, step: int) -> torch.Generator:
    """Generator of one step of a run; torch reads 32 bits of a seed, which therefore are a hash of both numbers."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


@dataclass(frozen=True)
class ModularAddition:
    """a + b mod p, trained on a fixed part of all pairs, full batch; the model reads the tokens a, b and p ("=").

    Attributes:
        share: part of the pairs that is trained on.
        split_seed: which pairs; chosen apart from the seed of the weights.
    """

    p: int
    share: float
    split_seed: int
    train: Batch = field(init=False)
    test: Batch = field(init=False)

    def __post_init__(self) -> None:
        a, b = (t.flatten() for t in torch.meshgrid(torch.arange(self.p), torch.arange(self.p), indexing="ij"))
        tokens = torch.stack((a, b, torch.full_like(a, self.p)), -1)
        targets = torch.full_like(tokens, -100)
        targets[:, -1] = (a + b) % self.p
        order = torch.randperm(self.p**2, generator=generator_of(self.split_seed, 0))
        chosen, others = order[: round(self.share * self.p**2)], order[round(self.share * self.p**2) :]
        object.__setattr__(self, "train", Batch(tokens[chosen], targets[chosen]))
        object.__setattr__(self, "test", Batch(tokens[others], targets[others]))

    def batch(self, seed: int, step: int) -> Batch:
        """All pairs that are trained on."""
        return self.train

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the sums."""
        return loss_of(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy on both parts, and the loss on the pairs that are not trained on."""
        device = next(model.parameters()).device
        train, test = (Batch(*(t.to(device) for t in part)) for part in (self.train, self.test))
        return {
            "test_loss": float(loss_of(model, test)),
            "train_accuracy": _accuracy(model, train),
            "test_accuracy": _accuracy(model, test),
        }


def _accuracy(model: nn.Module, batch: Batch) -> float:
    predicted = batch.targets != -100
    return float((model(batch.tokens).argmax(-1) == batch.targets)[predicted].float().mean())


@dataclass(frozen=True)
class TextTask:
    """Windows of tokenised text: the next token, or 15 % of the tokens, replaced by the mask token.

    Attributes:
        train: token ids [n]; windows begin anywhere.
        held_out: token ids of other documents.
        mask: id of the mask token, None to predict the next token.
        evaluation_batches: fixed batches of held-out text.
    """

    train: Tensor
    held_out: Tensor
    length: int
    batch_size: int
    mask: int | None = None
    evaluation_batches: int = 4

    def batch(self, seed: int, step: int) -> Batch:
        """Random windows of the training text."""
        return self._windows(self.train, generator_of(seed, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the predicted tokens."""
        return loss_of(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out loss in nats per predicted token, on the same windows every time."""
        device = next(model.parameters()).device
        losses = [float(loss_of(model, Batch(*(t.to(device) for t in batch)))) for batch in self.held_out_batches()]
        return {"held_out_loss": sum(losses) / len(losses)}

    def held_out_batches(self) -> list[Batch]:
        """The windows on which every model is evaluated."""
        return [self._windows(self.held_out, generator_of(0, i)) for i in range(self.evaluation_batches)]

    def _windows(self, text: Tensor, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - self.length, (self.batch_size, 1), generator=generator)
        windows = text[starts + torch.arange(self.length + 1)].long()
        if self.mask is None:
            return Batch(windows[:, :-1], windows[:, 1:])
        tokens = windows[:, :-1]
        hidden = torch.rand(tokens.shape, generator=generator) < HIDDEN_SHARE
        hidden[:, 0] |= ~hidden.any(1)  # every window predicts something
        return Batch(tokens.masked_fill(hidden, self.mask), tokens.masked_fill(~hidden, -100))
