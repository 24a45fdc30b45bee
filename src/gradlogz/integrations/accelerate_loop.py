"""The monitor around a training loop with accelerate.

    with AccelerateMonitor(accelerator, model):
        for batch in loader: ...

Read next: plain_loop.py.
"""

from collections.abc import Iterator
from typing import Any, Unpack

from accelerate import Accelerator
from torch import nn

from .plain_loop import LoopMonitor
from .session import MonitorOptions


class AccelerateMonitor(LoopMonitor):
    """Context that writes statistics of attention to the trackers of an Accelerator.

    Make it before `accelerator.load_state`: checkpoints contain the state of the monitor.

    Args:
        accelerator: the Accelerator; its `save_state` is the checkpoint of `save_checkpoint`.
        model: the prepared model.
        scheduler: the prepared scheduler, for the action `lower_learning_rate`.
        options: as in `MonitorOptions`.

    Law: tests/laws/test_integrations_change_nothing.py.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, *, scheduler: Any = None, **options: Unpack[MonitorOptions]
    ) -> None:
        self._accelerator = accelerator

        def save(step: int) -> None:
            accelerator.save_state(f"{accelerator.project_dir or '.'}/alert-step-{step}")

        scheduler = getattr(scheduler, "scheduler", scheduler)  # inside the wrapper of accelerate
        super().__init__(model, log=accelerator.log, save=save, scheduler=scheduler, **options)
        accelerator.register_for_checkpointing(self)

    def experiments(self) -> Iterator[Any]:
        for tracker in self._accelerator.trackers:
            yield tracker.tracker
