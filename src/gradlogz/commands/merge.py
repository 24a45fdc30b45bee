"""gradlogz merge: runs of one model over different texts, joined into one run.

Read next: ../probing/measurement_merge.py.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from .._input_errors import InputError, InputValueError
from .model_options import AllowPickle, AllowRemoteCode, Device, DeviceMap
from .outputs import Details, keeping, page_of, print_closing, print_lines, terminal

if TYPE_CHECKING:
    from ..probing.measurement import Measurement
    from ..probing.prediction import Prediction

LOGGER = logging.getLogger(__name__)
TEXTS = " and "  # between the names of texts


def command(
    runs: Annotated[
        list[str], typer.Argument(help="Two or more runs of gradlogz probe --keep-statistics.", metavar="RUN RUN ...")
    ],
    out: Annotated[str, typer.Option(help="Run folder to write.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model of the runs, if it has moved (default: that of the runs).", show_default=False),
    ] = None,
    device: Device = None,
    device_map: DeviceMap = None,
    prediction: Annotated[
        list[str] | None,
        typer.Option(help="Python file of a prediction of the runs; it is run; repeatable.", show_default=False),
    ] = None,
    details: Details = False,
    allow_pickle: AllowPickle = False,
    allow_remote_code: AllowRemoteCode = False,
) -> int:
    """Join runs of one model over different texts into the run over all of them.

    The runs need their statistics (probe --keep-statistics), and must have read their texts to the end (--tokens 0).

    The model is loaded for the draws of the matched baseline, which read windows of all texts; runs with --draws 0
    need no model.
    """
    from ..probing.measurement_file import kept_measurement, write_measurement
    from ..probing.measurement_merge import merged
    from ..probing.prediction_files import selected
    from ..probing.run_probe import evaluate
    from ..probing.runs.run_folder import Run, check_place, read_run, write_run
    from ..reporting import report
    from ..reporting.findings_terminal import claim_lines
    from ..reporting.formatting import measured_line

    if len(runs) < 2:
        raise InputValueError("merge", "runs", f"runs must be two or more, got {len(runs)}", "Name another run.")
    if any(os.path.realpath(Path(run).expanduser()) == os.path.realpath(Path(out).expanduser()) for run in runs):
        problem = f"{out} is one of the runs, which it would replace"
        raise InputValueError("merge", "--out", problem, "Name another folder.")
    place, console = check_place(out), terminal(None)
    described = [read_run(run, call="merge", statistics=True) for run in runs]
    known = selected(None, prediction or [])
    with _statistics_of_strangers(runs):
        measured = merged(runs, [kept_measurement(Path(run), known) for run in runs])
    options = measured.merge_data.options
    predictions = selected(options["predictions"], prediction or [])
    if measured.merge_data.windows:
        with console.status(Text("Measuring the draws of the matched baseline")):
            measured = _with_draws(
                runs, measured, predictions, model, device, device_map, allow_pickle, allow_remote_code
            )
    facts = {name: measured.facts[name] for name in ("weights_sha256", "config_sha256")}
    if reason := write_measurement(place, measured, facts):
        raise InputValueError("merge", "--out", f"the statistics are not written ({reason})", "Free some space.")
    findings = evaluate(measured, predictions=predictions, progress=True)
    counted = measured.report
    run = Run(
        model={"name": measured.probed.name, **measured.facts},
        text={"source": TEXTS.join(str(each.text.get("source")) for each in described), "length": counted.length},
        seed=options["seed"],
        command=shlex.join(["gradlogz", *sys.argv[1:]]),
        counts=counted.counts(),
        times=measured.seconds,
        findings=findings,
    )
    write_run(place, run, keep_statistics=True)
    with keeping([place]):
        page = page_of(place, report)
    print_lines(console, claim_lines(findings, measured.probed.name, console.width, details=details))
    line = f"{len(runs)} runs merged: {measured.probed.name}, {measured_line(findings.facts[measured.probed.name])}"
    print_closing(console, line, place, page)
    return 0


@contextmanager
def _statistics_of_strangers(runs: list[str]) -> Iterator[None]:
    """Context in which statistics from files, which may have any shape and content, are joined or read by a model.

    Their errors are sentences, since a stranger may have written them; the log has the traceback for errors of ours.
    """
    import torch

    try:
        yield
    except (InputError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = f"the statistics of {' and '.join(runs)} cannot be joined ({type(error).__name__}: {error})"
        remedy = "Probe the texts again with --keep-statistics; --log-level debug shows where it failed."
        LOGGER.debug("the statistics cannot be joined", exc_info=True)
        raise InputValueError("merge", "runs", problem, remedy) from error


def _with_draws(
    runs: list[str],
    measured: "Measurement",
    predictions: "list[Prediction]",
    model: str | None,
    device: str | None,
    device_map: str | None,
    allow_pickle: bool,
    allow_remote_code: bool,
) -> "Measurement":
    """Measure the draws of the matched baseline, on the windows of all texts."""
    from ..probing.inside.loading import load, locate
    from ..probing.inside.weights_hash import weights_hash
    from ..probing.passes.nulls import matched_of
    from ..probing.run_probe import chosen, matched_draws

    options = measured.merge_data.options
    source, revision = (options["model"], options["revision"]) if model is None else (model, None)
    located = locate(source, revision=revision, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code)
    if weights_hash(located) != measured.facts["weights_sha256"]:
        problem = f"{source} has other weights than the runs, whose draws it is to measure"
        raise InputValueError("merge", "--model", problem, "Name the model of the runs, or probe with --draws 0.")
    loaded = load(
        source, revision=revision, device=device, device_map=device_map, dtype=options["dtype"],
        allow_pickle=allow_pickle, allow_remote_code=allow_remote_code,
    )  # fmt: skip
    matched = matched_of(chosen(predictions), draws=options["draws"], baseline=options["baseline"])
    with _statistics_of_strangers(runs):
        values = matched_draws(loaded.model, measured.merge_data.windows, matched, measured.probed, options["draws"])
    if isinstance(values, str):
        return measured._replace(facts={**measured.facts, "without_matched": values})
    return measured._replace(matched=values[0], rescaled=values[1])
