"""File of the statistics of a run, from the end of the measurement until its findings are written.

    runs/minilm.statistics.pt       beside the folder runs/minilm; removed with the last step of a run

A process that is killed while it judges leaves the file. `run_probe.evaluate(read_statistics(path))` judges it again,
without the model.

Read next: run_folder.py (the findings), ../run_probe.py (the measurement).
"""

import os
from pathlib import Path
from typing import Any

import torch


def statistics_path(folder: str | os.PathLike[str]) -> Path:
    """Path of the statistics of a run with this folder."""
    place = Path(folder).expanduser().absolute()
    return place.with_name(f"{place.name}.statistics.pt")


def write_statistics(folder: str | os.PathLike[str], measurement: Any) -> Path | None:
    """Write a measurement beside the folder of its run; None if it cannot be written, which must not end the run."""
    path = statistics_path(folder)
    part = path.with_suffix(".part")
    try:
        torch.save(measurement, part)
        part.replace(path)
    except Exception:  # a full disk, or statistics of a user's prediction that cannot be pickled
        part.unlink(missing_ok=True)
        return None
    return path


def read_statistics(path: str | os.PathLike[str]) -> Any:
    """Read a measurement. The file is a pickle, which can run code: read only files of your own runs."""
    return torch.load(path, weights_only=False)
