"""The monitor in training loops of other libraries: their logs, their checkpoints, and actions on alerts.

TrainerMonitor     a callback of transformers.Trainer
LightningMonitor   a callback of Lightning
AccelerateMonitor  a context around a loop with accelerate
LoopMonitor        a context around any other loop
stop, save_checkpoint, lower_learning_rate      actions on alerts
heat_map           a statistic of all heads as an image

A library is imported when the name of its callback is first used.
"""

import typing as _typing

from .actions import stop as stop, save_checkpoint as save_checkpoint, lower_learning_rate as lower_learning_rate
from .head_maps import heat_map as heat_map
from .plain_loop import LoopMonitor as LoopMonitor
from . import libraries as _libraries

if _typing.TYPE_CHECKING:
    from .accelerate_loop import AccelerateMonitor as AccelerateMonitor
    from .lightning_callback import LightningMonitor as LightningMonitor
    from .trainer_callback import TrainerMonitor as TrainerMonitor


def __getattr__(name: str) -> _typing.Any:
    return _libraries.callback(__name__, name)
