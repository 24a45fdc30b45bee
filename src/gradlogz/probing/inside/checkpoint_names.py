"""Names of checkpoints on the command line, and their training steps.

    minilm, folder, file.gguf, owner/name     one model
    owner/name@step1000                       a revision of a model of the hub
    folder@step1000                           a subfolder
    folder                                    all its subfolders checkpoint-N, stepN, ..., if it has no weights itself

Read next: loading.py (loads one of them), weights_hash.py (tells whether two are the same).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..._errors import InputValueError
from ..._paths import user_path
from .loading import formats_in
from .training_step import step_in


class CheckpointName(NamedTuple):
    """A model or one of its checkpoints.

    Attributes:
        source: folder, file, package or name on the hub, as `load` takes it.
        revision: revision on the hub; None for the default one, and for folders.
        label: name in tables and findings.
        series: name of the training run it belongs to.
        part: name within the training run.
        step: training step; None if the name has none.
    """

    source: str
    revision: str | None
    label: str
    series: str
    part: str
    step: int | None

    @property
    def folder(self) -> Path:
        """Relative path of its run: a folder for the training run, with one for each checkpoint."""
        return Path(self.label) if self.series == self.label else Path(self.series) / self.part


def checkpoints_of(names: Sequence[str]) -> list[CheckpointName]:
    """Return the checkpoints that the arguments name; folders of checkpoints are replaced by their contents."""
    every = [checkpoint for name in names for checkpoint in _checkpoints(name)]
    labels = [each.label for each in every]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        remedy = "Name each checkpoint once; runs of different models are compared by gradlogz compare."
        raise InputValueError("probe", "model", f"two checkpoints have the name {twice}", remedy)
    return every


def _checkpoints(name: str) -> list[CheckpointName]:
    path = user_path("probe", "model", name)
    if path.is_dir() and not formats_in(path):
        parts = [part for part in path.iterdir() if part.is_dir() and step_in(part.name) is not None]
        parts = sorted((part for part in parts if formats_in(part)), key=lambda part: (step_in(part.name), part.name))
        folder = path.absolute().name
        return [_subfolder(part, folder) for part in parts] or [_single(name)]
    base, at, revision = name.rpartition("@")
    if path.exists() or not at:
        return [_single(name)]
    folder_of_base = Path(base).expanduser()
    if folder_of_base.is_dir():
        part = folder_of_base / revision
        if not part.is_dir():
            problem = f"the folder {base} has no subfolder {revision}"
            raise InputValueError("probe", "model", problem, "Name a subfolder that contains weights.")
        return [_subfolder(part, folder_of_base.absolute().name)]
    series = base.rpartition("/")[2]
    return [CheckpointName(base, revision, f"{series}@{revision}", series, revision, step_in(revision))]


def _single(name: str) -> CheckpointName:
    """Return a model that is named as a whole; its label is the last part of its path or of its name on the hub."""
    label = Path(name).name or name
    step = step_in(label)
    series = label if step is None else Path(name).expanduser().absolute().parent.name
    return CheckpointName(name, None, label, series, label, step)


def _subfolder(path: Path, folder: str) -> CheckpointName:
    return CheckpointName(str(path), None, f"{folder}@{path.name}", folder, path.name, step_in(path.name))
