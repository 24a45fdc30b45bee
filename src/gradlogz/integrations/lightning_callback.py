"""The monitor as a callback of Lightning.

    Trainer(callbacks=[LightningMonitor()])

Read next: session.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same library under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer

from .actions import TrainingRun
from .session import MonitorOptions, Session


class LightningMonitor(Callback):
    """Callback that writes statistics of attention to the loggers of a Lightning Trainer.

    Checkpoints contain the state of the monitor.

    Args:
        options: as in `MonitorOptions`.

    Law: tests/laws/test_integrations_change_nothing.py.
    """

    def __init__(self, **options: Unpack[MonitorOptions]) -> None:
        self._options = options
        self._session: Session | None = None
        self._state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session = Session(_LightningRun(trainer), **self._options)
        state, self._state = self._state, {}
        self._session.load_state_dict(state)
        self._session.begin(trainer.strategy.model)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._session is not None:
            self._session.finish_step()

    def on_train_end(self, *args: Any) -> None:
        if self._session is not None:
            self._session.end()

    on_exception = on_train_end

    def state_dict(self) -> dict[str, Any]:
        return {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


class _LightningRun(TrainingRun):
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def log(self, scalars: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(scalars, step)

    def experiments(self) -> Iterator[Any]:
        for logger in self._trainer.loggers:
            yield logger.experiment

    def stop(self) -> None:
        self._trainer.should_stop = True

    def save(self, step: int) -> None:
        self._trainer.save_checkpoint(Path(self._trainer.default_root_dir) / f"alert-step-{step}.ckpt")

    def optimizers_and_schedulers(self) -> tuple[list[Any], list[Any]]:
        return self._trainer.optimizers, [config.scheduler for config in self._trainer.lr_scheduler_configs]
