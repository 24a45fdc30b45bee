"""Models of the same settings and of several seeds, trained together: one batched operation in place of one for each.

    weights   [s, ...]     those of s models, views of one tensor [s, parameters]
    tokens    [s, b, n]    every model reads the batches of its own seed

A model trained here has the weights, up to rounding, that `training.train` gives it alone: initial weights, batches,
the bound on its gradient and its weight decay are its own. On a GPU the step is a CUDA graph, since launches would
cost more than the small models do. Runs are not resumed, and sums by atomics make them repeatable up to rounding only.

Softmax and tied attention, LayerNorm or no contraction, pre- or post-norm, free feed-forward layers.

Read next: training.py (one model), transformer.py (the parts).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

from gradlogz._errors import InputValueError

from .run_folders import RunFolder
from .tasks import Task, TextTask
from .training import TrainSettings, configuration, logarithmic_steps
from .transformer import Transformer

CHUNK = 16  # steps whose batches are moved to the device together
PENDING = 10  # rows of the curves that are kept on the device before they are written


class Member(NamedTuple):
    """A model to be trained, as in `train`; the members of an ensemble differ in seeds, tasks and weight decay."""

    model: Transformer
    task: Task
    training: TrainSettings
    seed: int
    folder: Path


Observe = Callable[["Ensemble"], dict[str, Tensor]]


class Ensemble:
    """Weights of several models, and their forward pass.

    predicted: positions whose logits are computed; the others are needed as keys of the last layer only.
    """

    def __init__(self, models: Sequence[Transformer], device: torch.device, predicted: slice = slice(None)) -> None:
        s = self.settings = models[0].settings
        supported = (
            s.attention in ("softmax", "tied")
            and s.contraction in ("layer_norm", "none")
            and s.placement != "peri"
            and s.feed_forward == "free"
            and not (s.shared or s.numbers or s.identity or s.frozen)
            and (predicted == slice(None) or s.objective == "masked")
            and all(model.settings == s for model in models)
        )
        if not supported:
            remedy = "Train them one by one, with experiments.training.train."
            raise InputValueError("Ensemble", "models", "models differ, or have a part that is not batched", remedy)
        self.predicted = predicted
        self.flat = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]).to(device)
        shapes = {name: p.shape for name, p in models[0].named_parameters()}
        parts = self.flat.split([shape.numel() for shape in shapes.values()], 1)
        self.weights = {
            name: part.unflatten(1, shape).detach().requires_grad_()
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def state_dict(self, member: int) -> dict[str, Tensor]:
        """Weights of one model, by their names in Transformer."""
        return {name: weight[member].detach() for name, weight in self.weights.items()}

    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Logits [s, b, n, vocabulary] of tokens [s, b, n]; dtype: of matrix products."""
        x = self.embed(tokens)
        for i in range(self.settings.layers):
            rows = self.predicted if i == self.settings.layers - 1 else slice(None)
            block = f"blocks.{i}"
            contracted = self._contraction(f"{block}.before.0", x)
            update = self._attention(f"{block}.attention.layer", contracted, rows, dtype)
            x = self._contraction(f"{block}.after.0", x[:, :, rows] + update)
            hidden = self._linear(f"{block}.feed_forward.0", self._contraction(f"{block}.before.1", x), dtype)
            x = self._contraction(f"{block}.after.1", x + self._linear(f"{block}.feed_forward.2", gelu(hidden), dtype))
        x = self._contraction("last", x)
        unembedding = self.weights["unembedding.weight" if self.settings.separate else "embedding.weight"]
        return _product(x.to(dtype), unembedding.mT.to(dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [s, b, n, d] before the first block."""
        offsets = self.settings.vocabulary * torch.arange(len(tokens), device=tokens.device)
        every = self.weights["embedding.weight"].flatten(0, 1)
        x = every.index_select(0, (tokens + offsets[:, None, None]).flatten()).unflatten(0, tokens.shape)
        return self._contraction("first", x + self.weights["positions"][:, None, : tokens.shape[2]])

    def losses(self, tokens: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Mean cross-entropy of every model [s] over its predicted tokens."""
        logits, targets = self.logits(tokens, dtype).float(), targets[:, :, self.predicted]
        each = cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="none")
        return each.unflatten(0, (len(tokens), -1)).sum(1) / (targets != -100).flatten(1).sum(1)

    def queries_and_keys(
        self, layer: str, tokens: Tensor, rows: slice, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Queries [s, b, h, m, e] of some rows and keys [s, b, h, n, e] of tokens [s, b, n, d]."""
        if self.settings.attention == "tied":
            q, k = (self._linear(f"{layer}.{name}", tokens, dtype) for name in ("q_proj", "k_proj"))
            return self._heads(q[:, :, rows]), self._heads(k)
        weights = self.weights[f"{layer}.in_proj_weight"].chunk(3, 1)
        biases = self.weights[f"{layer}.in_proj_bias"].chunk(3, 1)
        q = _affine(tokens[:, :, rows], weights[0], biases[0], dtype)
        return self._heads(q), self._heads(_affine(tokens, weights[1], biases[1], dtype))

    def _attention(self, layer: str, tokens: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        q, k = self.queries_and_keys(layer, tokens, rows, dtype)
        if self.settings.attention == "tied":
            steps = self.weights[f"{layer}.log_step"].exp()[:, None, :, None, None].to(dtype)
            means = self._joined(steps * self._attended(q, k, k))
            return _product(means, self.weights[f"{layer}.q_proj.weight"].to(dtype))
        weight = self.weights[f"{layer}.in_proj_weight"].chunk(3, 1)[2]
        v = self._heads(_affine(tokens, weight, self.weights[f"{layer}.in_proj_bias"].chunk(3, 1)[2], dtype))
        return self._linear(f"{layer}.out_proj", self._joined(self._attended(q, k, v)), dtype)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[3] == 1:  # one query: no matrix product
            weights = logits_of(q, k).softmax(-1)
            return (weights.unsqueeze(-1) * v).sum(3, keepdim=True)
        causal = self.settings.objective == "causal"
        means = scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal=causal)
        return means.unflatten(0, q.shape[:2])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.settings.heads, -1)).transpose(2, 3)

    @staticmethod
    def _joined(x: Tensor) -> Tensor:
        return x.transpose(2, 3).flatten(3)

    def _linear(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        return _affine(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], dtype)

    def _contraction(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        gain, bias = (self.weights[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        return torch.addcmul(bias, layer_norm(x, x.shape[-1:]), gain)


def logits_of(q: Tensor, k: Tensor) -> Tensor:
    """Logits [s, b, h, n] of one query [s, b, h, 1, e] and keys [s, b, h, n, e]."""
    return (q * k).sum(-1) * q.shape[-1] ** -0.5


def _affine(x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    flat = x.to(dtype).flatten(1, 2)
    return torch.baddbmm(bias.unsqueeze(1).to(dtype), flat, weight.mT.to(dtype)).unflatten(1, x.shape[1:3])


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.bmm(x.flatten(1, 2), matrix).unflatten(1, x.shape[1:3])


# Training -------------------------------------------------------------------------------------------------------------


class Trainer:
    """AdamW on an ensemble: `step` trains every model on a batch of its own."""

    def __init__(self, ensemble: Ensemble, trainings: Sequence[TrainSettings], tokens: Tensor, targets: Tensor) -> None:
        self.ensemble, self.training = ensemble, trainings[0]
        device = ensemble.flat.device
        self.decay = torch.tensor([t.weight_decay for t in trainings], device=device).unsqueeze(1)
        self.moments = torch.zeros(2, *ensemble.flat.shape, device=device)
        self.tokens, self.targets = tokens.clone(), targets.clone()
        t, steps = self.training, torch.arange(self.training.steps, dtype=torch.float64)
        rates = torch.tensor([t.rate(step) for step in range(t.steps)], dtype=torch.float64)
        # Rates, and the corrections of both moments, are on the device before the first step: no step waits for a copy.
        corrections = [1 - beta ** (steps + 1) for beta in (t.beta_1, t.beta_2)]
        self.schedule = torch.stack((rates, *corrections), 1).float().to(device)
        self.factors = torch.tensor([0.0, 1.0, 1.0], device=device)
        self.losses = torch.zeros(len(tokens), device=device)
        self.graph = self._captured() if device.type == "cuda" else None

    def step(self, step: int, tokens: Tensor, targets: Tensor) -> None:
        """Train one step; the losses before it are in `losses`."""
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)
        self.factors.copy_(self.schedule[step])
        if self.graph is None:
            self._trained()
        else:
            self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph; the rate is still 0, and moments are cleared."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._trained()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._trained()
        self.moments.zero_()
        return graph

    def _trained(self) -> None:
        t, flat = self.training, self.ensemble.flat
        losses = self.ensemble.losses(self.tokens, self.targets, torch.bfloat16 if t.bfloat16 else torch.float32)
        gradients = torch.autograd.grad(losses.sum(), list(self.ensemble.weights.values()))
        with torch.no_grad():
            self.losses.copy_(losses)
            g = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
            if t.clip is not None:
                g = g * (t.clip / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
            rate, first, second = self.factors
            m, v = self.moments
            flat.mul_(1 - rate * self.decay)
            m.lerp_(g, 1 - t.beta_1)
            v.mul_(t.beta_2).addcmul_(g, g, value=1 - t.beta_2)
            flat.sub_(rate / first * m / ((v / second).sqrt() + 1e-8))


def train_together(
    members: Sequence[Member],
    *,
    observe: Observe,
    predicted: slice = slice(None),
    device: str | torch.device | None = None,
) -> list[RunFolder]:
    """Train models together and write their run folders, as `train` does; complete runs are returned as they are.

    Args:
        observe: quantities [s] of every model, for each row of the curves.
        predicted: positions that the tasks predict.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    runs = [RunFolder(member.folder) for member in members]
    if all(run.complete is not None for run in runs):
        return runs
    training, begun = members[0].training, time.perf_counter()
    if any(replace(m.training, weight_decay=training.weight_decay) != training for m in members):
        problem = "settings of training may differ in weight decay only"
        raise InputValueError("train_together", "members", problem, "Train them in groups of equal settings.")
    for run, member in zip(runs, members, strict=True):
        run.begin(configuration(member.model, member.task, member.training, member.seed), place)
        run.cut_curves(0)
    ensemble = Ensemble([member.model for member in members], place, predicted)
    batches = _batches(members, place)
    tokens, targets = next(batches)
    trainer = Trainer(ensemble, [member.training for member in members], tokens, targets)
    marked, rows = logarithmic_steps(training.steps), []
    for step in range(training.steps + 1):
        if step in marked:
            _save(runs, members, ensemble, step)
        recorded = step % training.record_every == 0 or step == training.steps
        with torch.no_grad():
            seen = observe(ensemble) if recorded else {}
        if step < training.steps:
            trainer.step(step, tokens, targets)
            losses = trainer.losses
            tokens, targets = next(batches)
        else:
            with torch.no_grad():
                losses = ensemble.losses(tokens, targets)
        if recorded:
            rows.append((step, {"loss": losses.clone(), **seen}))
        if len(rows) == PENDING or step == training.steps:
            _record(runs, rows, training)
            rows = []
    for run in runs:
        run.finish({"last": run.curves[-1], "seconds of the ensemble": time.perf_counter() - begun})
    return runs


def held_out_loss(task: TextTask) -> Observe:
    """`TextTask.evaluate` for all models of an ensemble."""

    def observe(ensemble: Ensemble) -> dict[str, Tensor]:
        s, device = len(ensemble.flat), ensemble.flat.device
        losses = [
            ensemble.losses(*(t.to(device).expand(s, -1, -1) for t in (batch.tokens, batch.targets)))
            for batch in task.held_out_batches()
        ]
        return {"held_out_loss": torch.stack(losses).mean(0)}

    return observe


def _batches(members: Sequence[Member], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets [s, b, n] of every step on the device; a task whose batch never changes is moved once."""
    first = [member.task.batch(member.seed, 0) for member in members]
    if all(member.task.batch(member.seed, 1) is batch for member, batch in zip(members, first, strict=True)):
        constant = tuple(torch.stack(each).to(device) for each in zip(*first, strict=True))
        while True:
            yield constant[0], constant[1]
    begin = 0
    while True:
        steps = [[m.task.batch(m.seed, step) for m in members] for step in range(begin, begin + CHUNK)]
        tokens, targets = (
            torch.stack([torch.stack([batch[i] for batch in step]) for step in steps]).to(device) for i in range(2)
        )
        yield from zip(tokens, targets, strict=True)
        begin += CHUNK


def _save(runs: list[RunFolder], members: Sequence[Member], ensemble: Ensemble, step: int) -> None:
    for i, (run, member) in enumerate(zip(runs, members, strict=True)):
        run.checkpoint(step, ensemble.state_dict(i), member.model.settings.as_dict())


def _record(runs: list[RunFolder], rows: list[tuple[int, dict[str, Tensor]]], training: TrainSettings) -> None:
    for step, quantities in rows:
        values = {name: each.tolist() for name, each in quantities.items()}
        for i, run in enumerate(runs):
            run.record({"step": step, "rate": training.rate(step), **{name: each[i] for name, each in values.items()}})
