"""Runs of the checkpoints of a training run, each in a folder; finished ones are read, not measured again.

A checkpoint is finished if its run folder holds a complete run of the same weights, text and settings, by their hashes.
A checkpoint whose weights are those of another one gets a copy of its findings.

Read next: probe.py (the options, and the run of one model), ../probing/runs/run_folder.py (the run).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from .. import __version__
from .._input_errors import InputError
from .engine_options import EngineOptions

if TYPE_CHECKING:
    from rich.console import Console

    from ..probing.inside.checkpoint_names import CheckpointName
    from ..probing.prediction import Prediction
    from ..probing.runs.run_folder import Run

    Measure = Callable[[CheckpointName, Path, dict[str, str]], Run]


class Settings(NamedTuple):
    """Options of a probe that apply to every checkpoint; files: those of the user's own predictions."""

    text: str | None
    tokens: int
    length: int | None
    predictions: "list[Prediction]"
    files: list[str]
    device: str | None
    device_map: str | None
    dtype: str | None
    seed: int
    baseline_seed: int | None
    baseline: float
    draws: int
    allow_pickle: bool
    allow_remote_code: bool
    parts: int
    distribution: EngineOptions
    keep_statistics: bool

    @property
    def allowed(self) -> dict[str, bool]:
        """Permissions of `load` and `locate`."""
        return {"allow_pickle": self.allow_pickle, "allow_remote_code": self.allow_remote_code}

    @property
    def divided(self) -> bool:
        """True if the work is done in parts, in the folder of --resume."""
        return self.distribution.resume is not None

    def of_checkpoint(self, checkpoint: "CheckpointName") -> "Settings":
        """Return the settings of one of several checkpoints, whose parts are in a folder of their own."""
        if self.distribution.resume is None:
            return self
        folder = str(Path(self.distribution.resume) / checkpoint.folder)
        return self._replace(distribution=self.distribution._replace(resume=folder))

    def chosen(self) -> dict[str, Any]:
        """Return the settings on which findings depend, as JSON values by name."""
        return {
            "version": __version__, "tokens": self.tokens, "length": self.length, "seed": self.seed,
            "baseline_seed": self.baseline_seed, "baseline": self.baseline, "draws": self.draws, "dtype": self.dtype,
            "predictions": [each.name for each in self.predictions],
            "files": [hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest() for file in self.files],
        }  # fmt: skip

    def merge_options(self, checkpoint: "CheckpointName") -> dict[str, Any]:
        """Return the settings that must be equal in runs that are merged, and where the model is."""
        path = Path(checkpoint.source).expanduser()
        source = str(path.absolute()) if path.exists() else checkpoint.source
        settings = {name: value for name, value in self.chosen().items() if name != "tokens"}
        return {**settings, "model": source, "revision": checkpoint.revision}

    def hashes(self) -> dict[str, str]:
        """Return hashes of the text, and of the settings on which findings depend."""
        from ..probing.corpus.source_hash import source_hash

        settings = hashlib.sha256(json.dumps(self.chosen(), sort_keys=True).encode()).hexdigest()
        return {"text_sha256": source_hash(self.text), "settings_sha256": settings}


class CheckpointRun(NamedTuple):
    """The run of a checkpoint and the folder that holds it.

    origin: "measured", "kept" (read from its folder), or the label of the checkpoint with the same weights.
    """

    label: str
    folder: Path
    run: "Run"
    origin: str


def runs_of(
    checkpoints: "Sequence[CheckpointName]", root: Path, settings: Settings, console: "Console", measure: "Measure"
) -> Iterator[CheckpointRun]:
    """Yield the run of each checkpoint, once it is in its folder below `root`; end after an interrupted one.

    measure: writes the run of a checkpoint to a folder, with these facts added, and returns it.
    """
    from ..probing.runs.run_folder import check_place, write_run

    first: dict[tuple[str, str], CheckpointRun] = {}  # by the hashes of the weights and of the configuration
    one_series = len({checkpoint.series for checkpoint in checkpoints}) == 1
    for checkpoint in checkpoints:
        folder = root / (checkpoint.part if one_series else checkpoint.label)
        with console.status(Text(f"Hashing {checkpoint.label}")):
            facts = hashes_of(checkpoint, settings)
        model = (facts["weights_sha256"], facts["config_sha256"])
        other = first.get(model)
        run = finished(folder, facts)
        origin = "kept" if run is not None else "measured"
        if run is None and other is None:
            run = measure(checkpoint, check_place(folder), facts)
        elif run is None and other is not None:
            run = renamed(other.run, checkpoint)
            write_run(check_place(folder), run)
        assert run is not None
        done = CheckpointRun(checkpoint.label, folder, run, origin)
        first.setdefault(model, done)
        yield done if other is None else done._replace(origin=other.label)
        if not run.complete:
            return


def hashes_of(checkpoint: "CheckpointName", settings: Settings) -> dict[str, str]:
    """Return the hashes of weights, configuration, text and settings: runs with equal ones have equal findings."""
    from ..probing.inside.loading import locate
    from ..probing.inside.weights_hash import config_hash, weights_hash

    located = locate(checkpoint.source, revision=checkpoint.revision, **settings.allowed)
    model = {"weights_sha256": weights_hash(located), "config_sha256": config_hash(located)}
    return {**model, **settings.hashes()}


def finished(folder: Path, facts: dict[str, str]) -> "Run | None":
    """Return the run in a folder if it is complete and undamaged and has these facts; else None."""
    from ..probing.runs.run_folder import read_run

    try:
        run = read_run(folder)
    except InputError:
        return None
    return run if all(run.model.get(name) == value for name, value in facts.items()) else None


def renamed(run: "Run", checkpoint: "CheckpointName") -> "Run":
    """Return a run under the name and the step of another checkpoint with the same weights."""
    from ..probing.runs.findings import Findings

    label, step, findings = checkpoint.label, checkpoint.step, run.findings
    facts = {name: value for name, value in run.model.items() if name not in ("name", "step")}
    facts |= {"source": checkpoint.source} | ({} if step is None else {"step": step})
    return run._replace(
        model={"name": label, **facts},
        findings=Findings(
            {label: facts},
            [row._replace(model=label) for row in findings.rows],
            [claim._replace(model=label) for claim in findings.claims],
            [token._replace(model=label) for token in findings.tokens],
            findings.declarations,
            {(label, *place[1:]): replicates for place, replicates in findings.replicates.items()},
        ),
    )
