"""A probe in parts: the options of gradlogz probe as work for an engine.

Read next: probe.py (the command), ../probing/divided/divided_pass.py (the parts).
"""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._input_errors import InputRuntimeError
from .checkpoint_runs import Settings
from .engine_options import print_failures
from .outputs import keeping

if TYPE_CHECKING:
    from rich.console import Console

    from ..probing.divided.corpus_parts import DividedOutcome
    from ..probing.divided.model_source import ModelSource
    from ..probing.inside.checkpoint_names import CheckpointName
    from ..probing.inside.loading import Loaded
    from ..probing.measurement import Measurement
    from ..probing.prediction import Prediction


def arguments_of(
    checkpoint: "CheckpointName",
    loaded: "Loaded",
    settings: Settings,
    facts: dict[str, str],
    predictions: "list[Prediction]",
) -> dict[str, Any]:
    """Return the arguments of `divided_measure` for one model, but for the model itself."""
    from .._progress import reporter
    from ..probing.corpus.readers import corpus_of
    from ..probing.divided.corpus_parts import DividedPass

    distribution = settings.distribution
    folder = Path(str(distribution.resume)).expanduser()
    return {
        "source": _source(checkpoint, settings, [p.name for p in predictions]),
        "corpus": corpus_of(loaded.tokenizer, settings.text, reads=loaded.facts["reads"]),
        "options": DividedPass(
            settings.tokens or None, settings.length, settings.seed, settings.baseline, settings.draws, settings.parts
        ),
        "predictions": predictions,
        "facts": _facts(loaded, settings, facts),
        "known": known_facts(checkpoint, loaded, settings, facts),
        "folder": folder,
        "engine": distribution.engine_in("probe", folder),
        "restart": distribution.restart,
        "progress": reporter(True, "parts"),
    }


def measured_parts(outcome: "DividedOutcome", settings: Settings, console: "Console") -> "Measurement":
    """Return the measurement of the finished parts; raise if nothing can be judged."""
    if outcome.measured is not None:
        return outcome.measured
    print_failures(console, outcome.failures)
    if outcome.interrupted:
        fact = f"{outcome.finished} of {outcome.total} parts are finished; the same command continues."
        console.print(f"Interrupted: {fact}", style="yellow")
        signal.default_int_handler(signal.SIGINT, None)  # raises: the command ends as after Ctrl-C
    problem = f"{len(outcome.failures)} of {outcome.total} parts failed, and the others cannot be judged"
    with keeping([str(settings.distribution.resume)]):
        raise InputRuntimeError("probe", "--resume", problem, "The same command tries them again.")


def known_facts(
    checkpoint: "CheckpointName", loaded: "Loaded", settings: Settings, facts: Mapping[str, str]
) -> dict[str, Any]:
    """Return the facts of a model and its text that findings have."""
    known = {**loaded.facts, **facts} | ({} if checkpoint.step is None else {"step": checkpoint.step})
    return known | ({"synthetic_text": True} if settings.text is None and loaded.facts["reads"] == "reactions" else {})


def _facts(loaded: "Loaded", settings: Settings, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return what the parts depend on, by names that an error about a difference shows."""
    import torch

    hashes = {name: value for name, value in facts.items() if name != "settings_sha256"}
    device = settings.device_map or loaded.facts["device"]
    return {**hashes, **settings.chosen(), "parts": settings.parts, "device": device, "torch": torch.__version__}


def _source(checkpoint: "CheckpointName", settings: Settings, names: list[str]) -> "ModelSource":
    """Return the model for workers, whose working directory may be another."""
    from ..probing.divided.model_source import ModelSource

    path = Path(checkpoint.source).expanduser()
    source = str(path.absolute()) if path.exists() else checkpoint.source
    files = tuple(str(Path(file).expanduser().absolute()) for file in settings.files)
    seed = settings.seed if settings.baseline_seed is None else settings.baseline_seed
    return ModelSource(
        checkpoint.label, source, checkpoint.revision, settings.device, settings.device_map, settings.dtype,
        settings.allow_pickle, settings.allow_remote_code, tuple(names), files, seed,
    )  # fmt: skip
