"""Actions on alerts: functions of an alert and the training run, for any of the loops.

    TrainerMonitor(trainer, actions=[save_checkpoint, lower_learning_rate(0.5)])

Read next: session.py, which calls them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

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
    """Save a checkpoint, once in a step."""
    if _saved.get(run) != alert.step:
        _saved[run] = alert.step
        run.save(alert.step)


_saved: WeakKeyDictionary[TrainingRun, int] = WeakKeyDictionary()  # the last step that was saved


def lower_learning_rate(factor: float = 0.5) -> Action:
    """Action that multiplies all learning rates by a factor, once in a step, those of schedulers included."""
    lowered: WeakKeyDictionary[TrainingRun, int] = WeakKeyDictionary()  # the last step in which they were lowered

    def lower(alert: Alert, run: TrainingRun) -> None:
        if lowered.get(run) == alert.step:
            return
        lowered[run] = alert.step
        optimizers, schedulers = run.optimizers_and_schedulers()
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            for rate in RATES & group.keys():
                group[rate] *= factor
        for scheduler in _all_of(schedulers):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs[:] = [rate * factor for rate in scheduler.base_lrs]

    return lower


# Learning rates in the groups of an optimizer; those after the first are of schedulers such as OneCycleLR.
RATES = {"lr", "initial_lr", "max_lr", "min_lr"}


def _all_of(schedulers: list[Any]) -> Iterator[Any]:
    """Schedulers, and those that they are made of (SequentialLR, ChainedScheduler)."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all_of(getattr(scheduler, "_schedulers", []))
