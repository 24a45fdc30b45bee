"""Actions on alerts: functions of an alert and the training run, for any of the loops.

    TrainerMonitor(trainer, actions=[save_checkpoint, lower_learning_rate(0.5)])

Read next: session.py, which calls them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from ..attention import Alert


class TrainingRun(ABC):
    """A training run, as its loop lets it be logged and steered."""

    @abstractmethod
    def log(self, scalars: dict[str, float], step: int) -> None:
        """Write scalars to where the loop writes its own."""

    @abstractmethod
    def experiments(self) -> Iterator[Any]:
        """TensorBoard writers and runs of Weights & Biases to which the loop writes."""

    @abstractmethod
    def stop(self) -> None:
        """End the training after this step."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save a checkpoint."""

    @abstractmethod
    def optimizers_and_schedulers(self) -> tuple[list[Any], list[Any]]:
        """Optimizers, and schedulers of their learning rates."""


Action = Callable[[Alert, TrainingRun], None]


def stop(alert: Alert, run: TrainingRun) -> None:
    """End the training after the step of the alert."""
    run.stop()


def save_checkpoint(alert: Alert, run: TrainingRun) -> None:
    """Save a checkpoint."""
    run.save(alert.step)


def lower_learning_rate(factor: float = 0.5) -> Action:
    """Action that multiplies all learning rates by a factor, once in a step, those of schedulers included."""
    lowered: set[int] = set()

    def lower(alert: Alert, run: TrainingRun) -> None:
        if alert.step in lowered:
            return
        lowered.add(alert.step)
        optimizers, schedulers = run.optimizers_and_schedulers()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] *= factor
        for scheduler in schedulers:
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs[:] = [rate * factor for rate in scheduler.base_lrs]

    return lower
