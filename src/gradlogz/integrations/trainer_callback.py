"""The monitor as a callback of transformers.Trainer.

    trainer.add_callback(TrainerMonitor(trainer))

Read next: session.py.
"""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Unpack

from transformers import Trainer, TrainerCallback

from .actions import TrainingRun
from .session import MonitorOptions, Session

STATE = "gradlogz.TrainerMonitor"  # the name of the class would make the Trainer construct it


class TrainerMonitor(TrainerCallback):
    """Callback that writes statistics of attention to the logs of a Trainer.

    They go where the Trainer's own numbers go: `report_to`, the console and `state.log_history`. Checkpoints contain
    the state of the monitor. The monitor ends with `trainer.train()`, also where that raises.

    Args:
        trainer: the Trainer to which the callback is added.
        options: as in `MonitorOptions`.

    Law: tests/laws/test_integrations_change_nothing.py.
    """

    def __init__(self, trainer: Trainer, **options: Unpack[MonitorOptions]) -> None:
        self._session = Session(_TrainerRun(trainer), **options)
        self._trainer = trainer
        trainer.train = self._ending(trainer.train)

    def _ending(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Method of the Trainer that removes the monitor at its end: there is no event for a run that raises."""

        @wraps(train)
        def trained(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self._session.end()

        return trained

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.load_state_dict(state.stateful_callbacks.get(STATE, {}))
        self._session.begin(self._trainer.model_wrapped)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.finish_step()
        state.stateful_callbacks[STATE] = self._session.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.end()


class _TrainerRun(TrainingRun):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def log(self, scalars: dict[str, float], step: int) -> None:
        self._trainer.log(scalars)

    def experiments(self) -> Iterator[Any]:
        for callback in self._trainer.callback_handler.callbacks:
            if getattr(callback, "tb_writer", None) is not None:
                yield callback.tb_writer
        if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
            yield wandb.run

    def stop(self) -> None:
        self._trainer.control.should_training_stop = True

    def save(self, step: int) -> None:
        self._trainer.control.should_save = True

    def optimizers_and_schedulers(self) -> tuple[list[Any], list[Any]]:
        return [self._trainer.optimizer], [self._trainer.lr_scheduler]
