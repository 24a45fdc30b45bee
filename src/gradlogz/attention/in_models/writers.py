"""Writers of the monitor: TensorBoard, Weights & Biases and its like, or any function of a row.

    add_scalar        a method, as of TensorBoard's SummaryWriter: called for each scalar
    (dict, step=...)  a function with a parameter `step`, as wandb.log and mlflow.log_metrics
    (row)             any other function

Read next: monitor_rows.py (the scalars of a row).
"""

import inspect
from collections.abc import Callable
from typing import Any

from ..._errors import InputTypeError
from .monitor_rows import MonitorRow


def writing_function(writer: Any) -> Callable[[MonitorRow], None]:
    """Function that writes a row to a writer of one of the three kinds."""
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
