"""Statistics of all heads as images and tables, for TensorBoard and Weights & Biases.

Read next: ../attention/in_models/monitor_rows.py (the statistics).
"""

import sys
from typing import Any

import torch

from .._errors import InputValueError
from .._typing import Float, Tensor
from ..attention import MonitorRow
from ..attention.in_models.monitor_rows import STATISTICS

CELL = 16  # pixels of a head
MAPS = {"entropy": "mean", "max_logit": "greatest"}  # statistics that are shown, and of which rows
DARK = (0.05, 0.20, 0.45)  # colour of the largest value; the smallest is white, an unknown one grey


def heat_map(row: MonitorRow, statistic: str = "max_logit") -> Float[Tensor, "3 height width"]:
    """Image of a statistic, layers from top to bottom and heads from left to right, white to dark from least to most.

    >>> import torch, gradlogz
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> with gradlogz.monitor(model, every=1) as m:
    ...     output = model(torch.randn(2, 10, 16))
    ...     m.step()
    >>> gradlogz.integrations.heat_map(m.row(), "entropy").shape
    torch.Size([3, 16, 64])
    """
    if statistic not in STATISTICS:
        problem = f"statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}"
        raise InputValueError("heat_map", "statistic", problem, "Leave it out for the largest logits.")
    layers, part = list(row.layers.values()), MAPS.get(statistic, "mean")
    width = max((len(heads.entropy.mean) for heads in layers), default=0)
    table = torch.full((len(layers), width), torch.nan, dtype=torch.float64)
    for line, heads in zip(table, layers, strict=True):
        if (extremes := getattr(heads, statistic)) is not None:  # layers that call softmax themselves have no norms
            line[: len(extremes.mean)] = getattr(extremes, part)
    known = table[table.isfinite()]
    least, most = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    share = ((table - least) / (most - least + 1e-300)).clamp(0.0, 1.0)
    colour = 1.0 - share * (1.0 - torch.tensor(DARK, dtype=torch.float64)).reshape(3, 1, 1)
    return colour.nan_to_num(0.6).float().repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)


def write_heads(experiment: Any, row: MonitorRow, step: int) -> None:
    """Write heat maps to a TensorBoard writer, or a table of all heads to a run of Weights & Biases."""
    if not row.layers:  # no softmax in the model
        return
    if hasattr(experiment, "add_image"):
        for statistic in MAPS:
            experiment.add_image(f"attention/{statistic}", heat_map(row, statistic), step)
    elif (wandb := sys.modules.get("wandb")) is not None and hasattr(experiment, "log"):
        records = row.records()
        columns = list(dict.fromkeys(name for record in records for name in record))  # layers may differ
        table = wandb.Table(columns=columns, data=[[record.get(name) for name in columns] for record in records])
        experiment.log({"attention/heads": table})
