"""Runs with one prime and one share of the pairs, trained together: one batched operation in place of one for each.

    weights   [s, ...]     those of s models, views of one tensor [s, parameters]
    tokens    [s, b, 3]    every model reads the pairs of its own seed

Only the row of "=" is predicted, and there is one layer: queries, feed-forward units and logits are computed for that
row alone. A run has the curves, up to rounding, that `training.train` gives it; it is not resumed if it is killed.

Read next: experiment.py, ../training.py (one model).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from ..run_folders import RunFolder
from ..tasks import Batch, ModularAddition
from ..training import TrainSettings, check_settings, configuration, logarithmic_steps
from ..transformer import Transformer

LAYER = "blocks.0.attention.layer"


class Member(NamedTuple):
    """A run; the members of an ensemble differ in seeds and in weight decay."""

    model: Transformer
    task: ModularAddition
    training: TrainSettings
    seed: int
    folder: Path


class Ensemble:
    """Weights of several models of one layer without contraction, and their forward pass."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.heads = models[0].settings.heads
        self.flat = torch.stack([torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models])
        shapes = {name: p.shape for name, p in models[0].named_parameters()}
        parts = self.flat.split([shape.numel() for shape in shapes.values()], 1)
        self.weights = {
            name: part.unflatten(1, shape).detach().requires_grad_()
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [s, b, vocabulary] of the last row of tokens [s, b, n]."""
        x = self.embed(tokens)
        value = self._heads(self._projected(2, x))
        means = (self.attention_logits(x).softmax(-1).unsqueeze(-1) * value).sum(-2)
        last = x[:, :, -1] + self._linear(f"{LAYER}.out_proj", means.flatten(2))
        hidden = gelu(self._linear("blocks.0.feed_forward.0", last))
        last = last + self._linear("blocks.0.feed_forward.2", hidden)
        return torch.bmm(last, self.weights["unembedding.weight"].mT)

    def attention_logits(self, x: Tensor) -> Tensor:
        """Logits [s, b, h, n] of the last row of embedded tokens [s, b, n, d]."""
        q, k = self._heads(self._projected(0, x[:, :, -1:])), self._heads(self._projected(1, x))
        return (q * k).sum(-1) * q.shape[-1] ** -0.5

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [s, b, n, d] before the block."""
        table = self.weights["embedding.weight"]
        offsets = table.shape[1] * torch.arange(len(tokens))[:, None, None]
        x = table.flatten(0, 1).index_select(0, (tokens + offsets).flatten()).unflatten(0, tokens.shape)
        return x + self.weights["positions"][:, None]

    def losses(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of every model [s]."""
        logits, targets = self.logits(batch.tokens), batch.targets[:, :, -1]
        each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return each.unflatten(0, targets.shape).mean(1)

    def _projected(self, part: int, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"{LAYER}.in_proj_{name}"].chunk(3, 1)[part] for name in ("weight", "bias"))
        return torch.baddbmm(bias.unsqueeze(1), x.flatten(1, 2), weight.mT).unflatten(1, x.shape[1:3])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.baddbmm(self.weights[f"{name}.bias"].unsqueeze(1), x, self.weights[f"{name}.weight"].mT)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(2, 3)


def train_together(members: Sequence[Member], observe: Callable[[Ensemble], dict[str, Tensor]]) -> None:
    """Train the models and write their run folders, as `train` does; nothing is done if all are complete.

    observe: quantities [s] of every model, for each row of the curves.
    """
    runs, training = [RunFolder(member.folder) for member in members], members[0].training
    configs = [configuration(member.model, member.task, member.training, member.seed) for member in members]
    for run, config in zip(runs, configs, strict=True):
        check_settings(run, config)
    if all(run.complete is not None for run in runs):
        return
    for run, config in zip(runs, configs, strict=True):
        run.begin(config, torch.device("cpu"))
        run.cut_curves(0)
    ensemble = Ensemble([member.model for member in members])
    batch = stacked([member.task.train for member in members])
    decay = torch.tensor([member.training.weight_decay for member in members]).unsqueeze(1)
    moments = torch.zeros(2, *ensemble.flat.shape)
    marked = logarithmic_steps(training.steps)
    for step in range(training.steps + 1):
        if step in marked:
            for i, (run, member) in enumerate(zip(runs, members, strict=True)):
                weights = {name: weight[i].detach() for name, weight in ensemble.weights.items()}
                run.checkpoint(step, weights, member.model.settings.as_dict())
        losses = ensemble.losses(batch)
        if step % training.record_every == 0 or step == training.steps:
            with torch.no_grad():
                row = {name: each.tolist() for name, each in {"loss": losses, **observe(ensemble)}.items()}
            for i, run in enumerate(runs):
                run.record({"step": step, "rate": training.rate(step), **{name: row[name][i] for name in row}})
        if step < training.steps:
            gradients = torch.autograd.grad(losses.sum(), list(ensemble.weights.values()))
            adamw(ensemble.flat, torch.cat([each.flatten(1) for each in gradients], 1), moments, decay, training, step)
    for run in runs:
        run.finish({"last": run.curves[-1]})


@torch.no_grad()
def adamw(flat: Tensor, g: Tensor, moments: Tensor, decay: Tensor, training: TrainSettings, step: int) -> None:
    """One step of AdamW on weights [s, parameters], with a decay [s, 1] for each model."""
    t, (m, v) = training, moments  # Shorthand
    flat.mul_(1 - t.rate(step) * decay)
    m.lerp_(g, 1 - t.beta_1)
    v.mul_(t.beta_2).addcmul_(g, g, value=1 - t.beta_2)
    first, second = (1 - beta ** (step + 1) for beta in (t.beta_1, t.beta_2))
    flat.sub_(t.rate(step) / first * m / ((v / second).sqrt() + 1e-8))


def stacked(batches: Sequence[Batch]) -> Batch:
    """Batches of the members as one, [s, b, n]."""
    return Batch(*(torch.stack(each) for each in zip(*batches, strict=True)))
