"""Writers of the monitor: TensorBoard, Weights & Biases and its like, or any function of a row.

    add_scalar        a method, as of TensorBoard's SummaryWriter: called for each scalar
    (dict, step=...)  a function with a parameter `step`, as wandb.log and mlflow.log_metrics
    (row)             any other function

Read next: monitor_rows.py (the scalars of a row).
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ..._errors import InputTypeError
from .monitor_rows import MonitorRow


class RowWriter:
    """A writer of any kind. The first exception it raises is a warning, the others are ignored: training goes on."""

    def __init__(self, writer: Any) -> None:
        self._write, self._failed = _writing_function(writer), False

    def write(self, row: MonitorRow) -> None:
        """Write a row."""
        try:
            self._write(row)
        except Exception as error:
            if not self._failed:
                message = f"monitor: writer raised {error!r} at step {row.step}; the training continues."
                warnings.warn(message, stacklevel=2)
            self._failed = True


def _writing_function(writer: Any) -> Callable[[MonitorRow], None]:
    if hasattr(writer, "add_scalar"):
        return lambda row: _add_scalars(writer, row)
    if not callable(writer):
        condition = "writer must have a method add_scalar or be a function of a row, or of a dictionary and a step"
        remedy = "Pass a SummaryWriter, wandb.log, or a function of one argument."
        raise InputTypeError("monitor", "writer", f"{condition}, got {type(writer).__name__}", remedy)
    if _has_parameter_step(writer):
        return lambda row: writer(row.scalars(), step=row.step)
    return writer


def _add_scalars(writer: Any, row: MonitorRow) -> None:
    for name, value in row.scalars().items():
        writer.add_scalar(name, value, row.step)


def _has_parameter_step(function: Callable[..., Any]) -> bool:
    try:
        return "step" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C without a signature
        return False
