"""The training loop: AdamW with a linear warm-up and a cosine decay.

    rate(t) = r (t + 1) / w                                                t < w, the warm-up
    rate(t) = r (f + (1 - f) (1 + cos(pi (t - w) / (T - w))) / 2)          f: last rate over r; T: number of steps

A run is a function of its settings and its seed. If it is killed, the next call continues it from the last saved state,
and its curves are those of a run that was not killed.

Read next: run_folders.py (the files), tasks.py (the batches).
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradlogz._errors import InputValueError

from .run_folders import RunFolder
from .tasks import Batch, Task
from .transformer import Model

Observe = Callable[[Any], dict[str, float]]


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run.

    Attributes:
        clip: bound on the norm of the gradient; None for no bound.
        last_rate: learning rate at the end, relative to its largest value; 1 for a constant one.
        record_every: steps between two rows of the curves.
        save_every: steps between two saved states, from which a killed run resumes.
        stop_at: stop when a recorded quantity reaches a value, such as ("test_accuracy", 0.99).
        bfloat16, compiled: bfloat16 autocast and torch.compile, for GPUs.
    """

    steps: int
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.98
    warm_up: int = 10
    last_rate: float = 0.1
    clip: float | None = 1.0
    record_every: int = 10
    save_every: int = 100
    stop_at: tuple[str, float] | None = None
    bfloat16: bool = False
    compiled: bool = False

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (self.last_rate + (1 - self.last_rate) * (1 + math.cos(math.pi * progress)) / 2)


def logarithmic_steps(last: int) -> set[int]:
    """Steps 0, 1, 2, 4, 8, ... and the last.

    >>> sorted(logarithmic_steps(20))
    [0, 1, 2, 4, 8, 16, 20]
    """
    return {0, last, *(2**n for n in range(last.bit_length()) if 2**n <= last)}


def check_settings(run: RunFolder, config: dict[str, Any]) -> None:
    """Raise if the folder holds a run of other settings."""
    if run.config is not None and run.config != config:
        problem = f"{run.path} holds a run of other settings"
        raise InputValueError("train", "folder", problem, "Choose another folder, or delete this one.")


def train(
    model: Model,
    task: Task,
    settings: TrainSettings,
    *,
    seed: int,
    folder: Path,
    observe: Observe | None = None,
    device: str | torch.device | None = None,
) -> RunFolder:
    """Train a model, or continue the run in the folder; a complete run is returned as it is.

    Args:
        seed: of the batches; that of the weights is an argument of the model.
        observe: statistics of the model, added to each row of the curves.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run = RunFolder(folder)
    config = configuration(model, task, settings, seed)
    check_settings(run, config)
    if run.complete is not None:
        return run
    run.begin(config, place)
    model.to(place).train()
    optimizer = _optimizer(model, settings)
    first = _resume(run, model, optimizer)
    run.cut_curves(first)
    forward: nn.Module = torch.compile(model) if settings.compiled else model  # type: ignore[assignment]
    marked, begun = logarithmic_steps(settings.steps), time.perf_counter()
    for step in range(first, settings.steps + 1):
        if step in marked:
            run.checkpoint(step, model.state_dict(), model.settings.as_dict())
        if step % settings.save_every == 0 and step > first:
            run.save_state(_state(model, optimizer, step))
        batch = Batch(*(t.to(place) for t in task.batch(seed, step)))
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        with torch.autocast(place.type, torch.bfloat16) if settings.bfloat16 else nullcontext():
            loss = task.loss(forward, batch)
        if step % settings.record_every == 0 or step == settings.steps:
            row = {"step": step, "loss": loss.item(), "rate": settings.rate(step), **_evaluation(model, task, observe)}
            run.record(row)
            if settings.stop_at is not None and row[settings.stop_at[0]] >= settings.stop_at[1]:
                run.checkpoint(step, model.state_dict(), model.settings.as_dict())
                break
        if step == settings.steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    run.finish({"last": run.curves[-1], "seconds since it was begun or resumed": time.perf_counter() - begun})
    return run


def describe(task: Task) -> dict[str, Any]:
    """Settings of a task as plain values; tensors by their shape and sum."""
    fields: dict[str, Any] = {"task": type(task).__name__}
    for name, value in vars(task).items():
        if isinstance(value, Tensor):
            fields[name] = {"shape": list(value.shape), "sum": int(value.long().sum())}
        elif isinstance(value, int | float | str) or value is None:
            fields[name] = value
    return fields


def configuration(model: Model, task: Task, settings: TrainSettings, seed: int) -> dict[str, Any]:
    """Settings that determine a run, as JSON returns them."""
    stop = settings.stop_at
    training = asdict(settings) | {"stop_at": stop if stop is None else list(stop)}
    return {"model": model.settings.as_dict(), "training": training, "task": describe(task), "seed": seed}


def _optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=(settings.beta_1, settings.beta_2),
    )


@torch.no_grad()
def _evaluation(model: Model, task: Task, observe: Observe | None) -> dict[str, float]:
    model.eval()
    row = task.evaluate(model) | ({} if observe is None else observe(model))
    model.train()
    return row


# The state of a run ---------------------------------------------------------------------------------------------------


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Tensor]:
    """Weights, moments of the optimizer by the number of their parameter, and the step, as tensors by name."""
    moments = optimizer.state_dict()["state"]
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    tensors |= {f"optimizer.{i}.{name}": t for i, each in moments.items() for name, t in each.items()}
    return tensors | {"step": torch.tensor(step)}


def _resume(run: RunFolder, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the state of a killed run; return the step at which to continue."""
    state = run.load_state()
    if state is None:
        return 0
    model.load_state_dict({n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")})
    moments: dict[int, dict[str, Tensor]] = {}
    for key, t in state.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".", 2)
            moments.setdefault(int(number), {})[name] = t
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return int(state["step"])
