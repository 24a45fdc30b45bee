"""Models of the same settings, trained together: one batched operation in place of one for each model.

    weights   [s, ...]           those of s models, views of one tensor [s, parameters]
    batches   [steps, s, ...]    a batch for every step and model, or [1, s, ...] for the same in all steps

A model has the curves, up to rounding, that `training.train` gives it alone. On a GPU a step is a CUDA graph that reads
rates and batches from tensors on the device, since launches would cost more than small models do. A run is not resumed
if it is killed.

Read next: specific_heat/ensembles.py (a forward pass), training.py (one model).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .run_folders import RunFolder
from .tasks import Batch, Task
from .training import TrainSettings, check_settings, configuration, logarithmic_steps
from .transformer import Transformer


class Member(NamedTuple):
    """A run; the members of an ensemble differ in seeds and in weight decay."""

    model: Transformer
    task: Task
    training: TrainSettings
    seed: int
    folder: Path


class Ensemble(ABC):
    """Weights of several models of the same settings, on one device."""

    def __init__(self, models: Sequence[Transformer], device: torch.device) -> None:
        self.settings = models[0].settings
        flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
        self.flat = torch.stack(flat).to(device)
        shapes = {name: p.shape for name, p in models[0].named_parameters()}
        parts = self.flat.split([shape.numel() for shape in shapes.values()], 1)
        self.weights = {
            name: part.view(len(models), *shape).detach().requires_grad_()
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    @abstractmethod
    def losses(self, batch: Batch) -> Tensor:
        """Loss of every model [s] on its batch [s, ...]."""


Observe = Callable[[Ensemble], dict[str, Tensor]]


def train_together(
    members: Sequence[Member],
    make: Callable[[Sequence[Transformer], torch.device], Ensemble],
    batches: Batch,
    observe: Observe,
    device: torch.device,
    *,
    seconds: float = float("inf"),
    all_checkpoints: bool = True,
) -> bool:
    """Train models and write their run folders, as `train` does; return whether they are complete.

    Args:
        make: the ensemble of models on a device.
        batches: a batch for every step and for the evaluation after the last, or one for all; on the device.
        observe: quantities [s] of every model, for each row of the curves.
        seconds: after which training is given up; the runs are then not complete.
        all_checkpoints: write them at logarithmic steps, as `train` does, and not only after the last step.
    """
    runs, training = [RunFolder(member.folder) for member in members], members[0].training
    configs = [configuration(member.model, member.task, member.training, member.seed) for member in members]
    for run, config in zip(runs, configs, strict=True):
        check_settings(run, config)
    if all(run.complete is not None for run in runs):
        return True
    for run, config in zip(runs, configs, strict=True):
        run.begin(config, device)
        run.cut_curves(0)
    ensemble = make([member.model for member in members], device)
    trainer = Trainer(ensemble, [member.training for member in members], batches)
    begun, marked = time.perf_counter(), logarithmic_steps(training.steps) if all_checkpoints else {training.steps}
    rows: list[tuple[int, dict[str, Tensor]]] = []
    for step in range(training.steps + 1):
        if step in marked:
            for i, (run, member) in enumerate(zip(runs, members, strict=True)):
                weights = {name: weight[i].detach() for name, weight in ensemble.weights.items()}
                run.checkpoint(step, weights, member.model.settings.as_dict())
        recorded = step % training.record_every == 0 or step == training.steps
        with torch.no_grad():
            quantities = observe(ensemble) if recorded else {}
        trainer.step(last=step == training.steps)
        if recorded:
            rows.append((step, {"loss": trainer.losses.clone(), **quantities}))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the clock below is that of the device
            if time.perf_counter() - begun > seconds:
                return False
    _record(runs, rows, training)
    return True


def _record(runs: list[RunFolder], rows: list[tuple[int, dict[str, Tensor]]], training: TrainSettings) -> None:
    names = list(rows[0][1])
    values = torch.stack([torch.stack([row[name].double() for name in names]) for _, row in rows]).cpu()
    for i, run in enumerate(runs):
        run.record(
            *(
                {"step": step, "rate": training.rate(step), **dict(zip(names, values[n, :, i].tolist(), strict=True))}
                for n, (step, _) in enumerate(rows)
            )
        )
        run.finish({"last": run.curves[-1]})


class Trainer:
    """AdamW on an ensemble."""

    def __init__(self, ensemble: Ensemble, trainings: Sequence[TrainSettings], batches: Batch) -> None:
        self.ensemble, self.training, self.batches = ensemble, trainings[0], batches
        device, t = ensemble.flat.device, self.training
        self.decay = torch.tensor([each.weight_decay for each in trainings], device=device).unsqueeze(1)
        self.moments = torch.zeros(2, *ensemble.flat.shape, device=device)
        schedule = [(t.rate(n), 1 - t.beta_1 ** (n + 1), 1 - t.beta_2 ** (n + 1)) for n in range(t.steps + 1)]
        self.schedule = torch.tensor(schedule, dtype=torch.float64).float().to(device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        self.losses = torch.zeros(len(ensemble.flat), dtype=torch.float64, device=device)
        self.graph = self._captured() if device.type == "cuda" else None

    def step(self, *, last: bool = False) -> None:
        """Train every model on its next batch; the losses before the step are in `losses`.

        last: only evaluate.
        """
        if last:
            with torch.no_grad():
                self.losses.copy_(self.ensemble.losses(self._batch()))
        elif self.graph is not None:
            self.graph.replay()
        else:
            self._trained()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """A step as a CUDA graph; what the calls before it changed is restored."""
        flat = self.ensemble.flat.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._trained()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._trained()
        self.ensemble.flat.copy_(flat)
        self.moments.zero_()
        self.index.zero_()
        return graph

    def _batch(self) -> Batch:
        if len(self.batches.tokens) == 1:
            return Batch(self.batches.tokens[0], self.batches.targets[0])
        return Batch(*(part.index_select(0, self.index)[0] for part in self.batches))

    def _trained(self) -> None:
        losses = self.ensemble.losses(self._batch())
        gradients = torch.autograd.grad(losses.sum(), list(self.ensemble.weights.values()))
        with torch.no_grad():
            self.losses.copy_(losses)
            factors = self.schedule.index_select(0, self.index)[0]
            gradient = torch.cat([each.reshape(len(each), -1) for each in gradients], 1)
            adamw(self.ensemble.flat, gradient, self.moments, self.decay, self.training, factors)
            self.index.add_(1)


def adamw(flat: Tensor, g: Tensor, moments: Tensor, decay: Tensor, training: TrainSettings, factors: Tensor) -> None:
    """One step of AdamW on weights [s, parameters], with a decay [s, 1] for each model.

    factors: the learning rate, and 1 - beta^(step + 1) for both moments.
    """
    t, (m, v), (rate, first, second) = training, moments, factors  # Shorthand
    if t.clip is not None:
        g = g * (t.clip / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
    flat.mul_(1 - rate * decay)
    m.lerp_(g, 1 - t.beta_1)
    v.mul_(t.beta_2).addcmul_(g, g, value=1 - t.beta_2)
    flat.sub_(rate / first * m / ((v / second).sqrt() + 1e-8))
