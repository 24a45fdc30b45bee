"""The monitor around a plain training loop.

    with LoopMonitor(model, log=wandb.log, actions=[stop]) as m:
        for batch in loader:
            loss(batch).backward(); optimizer.step(); optimizer.zero_grad()
            if m.stopped: break

Read next: session.py, accelerate_loop.py.
"""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Unpack

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._errors import InputValueError
from ..attention.in_models.monitoring import has_parameters_of
from .actions import TrainingRun, save_checkpoint
from .session import MonitorOptions, Session


class LoopMonitor(TrainingRun):
    """Context of a training loop; each step of an optimizer of the model ends a step.

    Args:
        model: the model as the loop calls it: compiled, or wrapped for distributed training.
        log: a TensorBoard SummaryWriter, a run of Weights & Biases, or a function log(scalars, step=step), such as
            wandb.log or mlflow.log_metrics.
        save: function of the step that saves a checkpoint, for the action `save_checkpoint`.
        scheduler: scheduler of the learning rate, for the action `lower_learning_rate`.
        options: as in `MonitorOptions`.

    Law: tests/laws/test_integrations_change_nothing.py.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        log: Any = None,
        save: Callable[[int], Any] | None = None,
        scheduler: Any = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.stopped = False
        self._model, self._log, self._save, self._scheduler = model, log, save, scheduler
        if save_checkpoint in options.get("actions", ()):
            self._saver()
        self._session = Session(self, **options)
        self._optimizers: list[Optimizer] = []

    def __enter__(self) -> "LoopMonitor":
        self.stopped = False
        self._session.begin(self._model)
        self._hook = register_optimizer_step_post_hook(self._stepped)  # after that of the monitor
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hook.remove()
        self._session.end()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(optimizer is known for known in self._optimizers):
            if not has_parameters_of(self._model, optimizer):
                return
            self._optimizers.append(optimizer)
        self._session.finish_step()

    def state_dict(self) -> dict[str, Any]:
        """State of the monitor, for a checkpoint."""
        return self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, before or inside the context."""
        self._session.load_state_dict(state)

    def log(self, scalars: dict[str, float], step: int) -> None:
        if hasattr(self._log, "add_scalar"):
            for name, value in scalars.items():
                self._log.add_scalar(name, value, step)
        elif self._log is not None:
            getattr(self._log, "log", self._log)(scalars, step=step)

    def experiments(self) -> Iterator[Any]:
        if hasattr(self._log, "add_image") or hasattr(self._log, "log"):
            yield self._log

    def stop(self) -> None:
        self.stopped = True

    def save(self, step: int) -> None:
        self._saver()(step)

    def _saver(self) -> Callable[[int], Any]:
        if self._save is None:
            problem = "save must be given for the action save_checkpoint"
            raise InputValueError("LoopMonitor", "save", problem, "Pass save= with a function of the step.")
        return self._save

    def optimizers_and_schedulers(self) -> tuple[list[Any], list[Any]]:
        return self._optimizers, [] if self._scheduler is None else [self._scheduler]
