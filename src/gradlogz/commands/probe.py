"""gradlogz probe: measure a model or its checkpoints on a text, write runs and a page, print the verdicts.

Read next: checkpoint_runs.py (several checkpoints), ../probing/run_probe.py (the measurement).
"""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from .._input_errors import InputValueError
from .boundary import INTERRUPTED, PARTIAL
from .checkpoint_runs import CheckpointRun, Settings, hashes_of, runs_of
from .divided_probe import arguments_of, known_facts, measured_parts
from .engine_options import Address, EngineName, EngineOptions, Gpus, Restart, Resume, Workers, print_failures
from .interventions import Intervene, check_intervene, print_interventions, write_interventions
from .model_options import AllowPickle, AllowRemoteCode, Device, DeviceMap
from .outputs import (
    NO_PAGE,
    Csv,
    Details,
    Force,
    Parquet,
    check_files,
    check_tables,
    keeping,
    page_of,
    print_closing,
    print_lines,
    terminal,
    write_json,
    write_tables,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..probing.inside.checkpoint_names import CheckpointName
    from ..probing.inside.loading import Loaded
    from ..probing.measurement import Measurement
    from ..probing.runs.findings import Findings
    from ..probing.runs.run_folder import Run
    from ..reporting.comparison_page import Runs

SOURCES = {"text": "topics of Python's built-in help", "reactions": "textbook reactions"}  # default texts
RUNS = "runs"  # default folder of runs
SERIES = "checkpoints"  # default name of a folder for checkpoints of several training runs
TRAJECTORY = "trajectory.html"  # page of several checkpoints
STANDARD_INPUT = "-"
MODEL = "minilm"  # default model
STOPPED = "Interrupted: the results cover only the text read so far."
FAILED = "Parts failed: the results cover the others. The same command tries them again."
FREE = "Free some space, or drop --keep-statistics."
MEASURED = "The statistics that an earlier command left in the run folder are judged; the text is not read again."


def command(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models: minilm (default), smollm2, rxnmapper, rxnfp, folder, GGUF file, Hub name, NAME@REVISION.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Text file, folder of texts or images, or - for standard input (default: bundled text).",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Approximate number of tokens to read; 0 for all.")] = 20_000,
    length: Annotated[
        int | None,
        typer.Option(help="Window length in tokens (default: min(1024, context length)).", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Names of predictions, separated by commas, such as ascent,tie; repeatable (default: all).",
            show_default=False,
        ),
    ] = None,
    prediction: Annotated[
        list[str] | None,
        typer.Option(help="Python file that defines a prediction; it is run; repeatable.", show_default=False),
    ] = None,
    details: Details = False,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run folder, or folder of the runs of checkpoints (default: runs/MODEL).", show_default=False
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="JSON file for the findings; - for standard output (default: none).", show_default=False),
    ] = None,
    csv: Csv = None,
    parquet: Parquet = None,
    force: Force = False,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Precision: float32, float64, bfloat16 or float16 (default: float32).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of document sampling.")] = 0,
    baseline_seed: Annotated[
        int | None, typer.Option(help="Random seed of all null models (default: that of --seed).", show_default=False)
    ] = None,
    baseline: Annotated[
        float,
        typer.Option("--baseline", help="Share of the text for untrained models of --prediction; 0: no draws."),
    ] = 0.1,
    draws: Annotated[int, typer.Option(min=0, help="Number of draws of the matched baseline; 0 for none.")] = 20,
    intervene: Intervene = None,
    resume: Resume = None,
    engine: EngineName = None,
    workers: Workers = None,
    address: Address = None,
    gpus: Gpus = None,
    restart: Restart = False,
    parts: Annotated[int, typer.Option(min=8, help="Most parts of the text, if the work is divided by --resume.")] = 64,
    keep_statistics: Annotated[
        bool, typer.Option("--keep-statistics", help="Keep the statistics in the run, for gradlogz merge.")
    ] = False,
    allow_pickle: AllowPickle = False,
    allow_remote_code: AllowRemoteCode = False,
) -> int:
    """Test the theory of attention (Shim, 2022) on a trained transformer, head by head, with 95 % CIs and null models.

    Prints a table of verdicts and writes a run folder with an HTML page.

    Several checkpoints, or a folder of checkpoints (checkpoint-500, step1000), become one page of trajectories.
    Checkpoints that are finished are not measured again.

    Ctrl-C ends the run after the current batch; the results so far are written.

    With --resume the work is divided into parts, on the cores of this machine or on a cluster; the same command
    continues where it stopped.
    """
    from ..probing.inside.checkpoint_names import checkpoints_of
    from ..probing.prediction_files import selected

    console = terminal(json)
    files = {"--json": json, "--csv": csv, "--parquet": parquet}
    check_files("probe", files, inputs=[text, *(prediction or [])], force=force)
    check_tables("probe", parquet)
    check_intervene(intervene)
    predictions, checkpoints = selected(only, prediction or []), checkpoints_of(model or [MODEL])
    settings = Settings(
        text, tokens, length, predictions, prediction or [], device, device_map, dtype, seed, baseline_seed,
        baseline, draws, allow_pickle, allow_remote_code, parts,
        EngineOptions(engine, workers, resume, restart, address, gpus), keep_statistics,
    )  # fmt: skip
    _check_distribution(settings)
    outputs = Outputs(json, csv, parquet, details, intervene)
    if len(checkpoints) == 1:
        place = Path(out) if out is not None else Path(RUNS) / checkpoints[0].folder
        return _one(console, checkpoints[0], place, settings, outputs)
    series = {checkpoint.series for checkpoint in checkpoints}
    place = Path(out) if out is not None else Path(RUNS) / (series.pop() if len(series) == 1 else SERIES)
    return _several(console, checkpoints, place, settings, outputs)


class Outputs(NamedTuple):
    """Outputs beside the run folders and the page."""

    json: str | None
    csv: str | None
    parquet: str | None
    details: bool
    intervene: str | None

    def write(self, findings: "Findings") -> None:
        """Write the files."""
        from ..probing.runs.findings_file import findings_to_json

        write_json(self.json, findings_to_json(findings))
        write_tables(self.csv, self.parquet, findings)


class Probe(NamedTuple):
    """The run of a model, the model, a sentence on the text that it read, and the parts that failed."""

    run: "Run"
    loaded: "Loaded"
    words: str
    failures: Mapping[str, str]


def _probe(
    checkpoint: "CheckpointName", place: Path, settings: Settings, console: "Console", facts: dict[str, str]
) -> Probe:
    """Measure and judge one model, and write its run, with these facts added."""
    from ..probing.divided.divided_pass import divided_measure
    from ..probing.inside.loading import load
    from ..probing.measurement import with_merge_options
    from ..probing.measurement_file import write_measurement
    from ..probing.run_probe import chosen, evaluate
    from ..probing.runs.run_folder import Run, write_run

    with console.status(Text(f"Loading {checkpoint.label}")):
        loaded = load(
            checkpoint.source, revision=checkpoint.revision, device=settings.device, device_map=settings.device_map,
            dtype=settings.dtype, **settings.allowed,
        )  # fmt: skip
    _check_reading(loaded)
    failures: Mapping[str, str] = {}
    if settings.divided:
        arguments = arguments_of(checkpoint, loaded, settings, facts, chosen(settings.predictions))
        outcome = divided_measure(loaded=loaded, **arguments)
        measured, failures = measured_parts(outcome, settings, console), outcome.failures
        measured = with_merge_options(measured, settings.merge_options(checkpoint))
    else:
        measured = _undivided(checkpoint, loaded, place, settings, facts, console)
    if settings.keep_statistics and measured.complete and (reason := write_measurement(place, measured, facts)):
        raise InputValueError("probe", "--keep-statistics", f"the statistics are not written ({reason})", FREE)
    findings = evaluate(measured, predictions=settings.predictions, progress=True)
    report = measured.report
    run = Run(
        model={"name": measured.probed.name, **measured.facts},
        text={"source": settings.text or SOURCES.get(measured.facts["reads"], ""), "length": report.length},
        seed=settings.seed,
        command=shlex.join(["gradlogz", *sys.argv[1:]]),
        counts=report.counts(),
        times=measured.seconds,
        findings=findings,
        complete=measured.complete,
    )
    write_run(place, run, keep_statistics=settings.keep_statistics and measured.complete)
    return Probe(run, loaded, report.words(), failures)


def _undivided(
    checkpoint: "CheckpointName",
    loaded: "Loaded",
    place: Path,
    settings: Settings,
    facts: dict[str, str],
    console: "Console",
) -> "Measurement":
    """Measure one model, or read what an earlier command has measured and not judged, or kept."""
    from ..probing.measurement import with_merge_options
    from ..probing.measurement_file import read_measurement, write_measurement

    repeatable = settings.text != STANDARD_INPUT
    known = read_measurement(place, facts, settings.predictions) if repeatable else None
    same = (checkpoint.label, loaded.facts["device"])
    if known is not None and (known.probed.name, known.facts.get("device")) == same:
        console.print(MEASURED, style="dim", highlight=False)
        return known
    measured = with_merge_options(_measured(checkpoint, loaded, settings, facts), settings.merge_options(checkpoint))
    if repeatable and measured.complete and (reason := write_measurement(place, measured, facts)):
        console.print(f"The statistics are not on the disk while they are judged: {reason}.", style="yellow")
    return measured


def _measured(
    checkpoint: "CheckpointName", loaded: "Loaded", settings: Settings, facts: dict[str, str]
) -> "Measurement":
    """Measure one model, with these facts added."""
    from ..probing.corpus.readers import corpus_of
    from ..probing.run_probe import measure

    corpus = corpus_of(loaded.tokenizer, settings.text, reads=loaded.facts["reads"])
    known = known_facts(checkpoint, loaded, settings, facts)
    return measure(
        loaded.model, loaded.tokenizer, corpus, name=checkpoint.label, facts=known, tokens=settings.tokens or None,
        length=settings.length, predictions=settings.predictions, baseline=settings.baseline, draws=settings.draws,
        seed=settings.seed, baseline_seed=settings.baseline_seed, progress=True,
    )  # fmt: skip


def _one(console: "Console", checkpoint: "CheckpointName", place: Path, settings: Settings, outputs: Outputs) -> int:
    """Probe one model: a run folder with its page."""
    from ..probing.runs.run_folder import check_place
    from ..reporting import report
    from ..reporting.findings_terminal import claim_lines
    from ..reporting.formatting import measured_line

    if outputs.intervene is not None and settings.text == STANDARD_INPUT:
        problem = "standard input can be read only once, but interventions read the text again"
        raise InputValueError("probe", "--text", problem, "Save the text to a file.")
    check_place(place)
    run, loaded, words, failures = _probe(checkpoint, place, settings, console, hashes_of(checkpoint, settings))
    effects = None
    with keeping([place]):
        outputs.write(run.findings)
        if outputs.intervene is not None:
            effects = write_interventions(
                place, outputs.intervene, loaded, settings.text, name=checkpoint.label, tokens=settings.tokens,
                length=settings.length, seed=settings.seed,
            )  # fmt: skip
        page = page_of(place, report)  # files come first, so that a closed pipe costs no result
    print_lines(console, claim_lines(run.findings, checkpoint.label, console.width, details=outputs.details))
    if effects is not None:
        print_interventions(console, effects)
    print_failures(console, failures)
    if not run.complete:
        console.print(FAILED if failures else STOPPED, style="yellow")
    if outputs.details:
        console.print(words, style="dim", highlight=False)
    line = f"{checkpoint.label}, {measured_line(run.findings.facts[checkpoint.label])}"
    print_closing(console, line, place, page)
    return 0 if run.complete else PARTIAL if failures else INTERRUPTED


def _several(
    console: "Console", checkpoints: "list[CheckpointName]", root: Path, settings: Settings, outputs: Outputs
) -> int:
    """Probe checkpoints: a run folder for each, and one page of trajectories."""
    from ..reporting.comparison_page import read_all
    from ..reporting.trajectory_terminal import trajectory_lines

    if outputs.intervene is not None:
        problem = "--intervene applies to one model, but there are several checkpoints"
        raise InputValueError("probe", "--intervene", problem, "Probe one checkpoint with --intervene.")
    if settings.text == STANDARD_INPUT:
        problem = "standard input can be read only once, but there are several checkpoints"
        raise InputValueError("probe", "--text", problem, "Save the text to a file.")
    done: list[CheckpointRun] = []

    def measure(checkpoint: "CheckpointName", folder: Path, facts: dict[str, str]) -> "Run":
        probed = _probe(checkpoint, folder, settings.of_checkpoint(checkpoint), console, facts)
        failures.update({f"{checkpoint.label}, {name}": error for name, error in probed.failures.items()})
        return probed.run

    folders: list[Path] = []
    failures: dict[str, str] = {}
    page = "none; fewer than two checkpoints are measured"
    with keeping(folders):
        for each in runs_of(checkpoints, root, settings, console, measure):
            done.append(each)
            folders.append(each.folder)
            fact = each.origin if each.origin in ("measured", "kept") else f"same weights as {each.origin}"
            console.print(f"{each.label}: {fact}", style="dim", highlight=False)
        complete = done[-1].run.complete
        line = f"{len(done)} of {len(checkpoints)} checkpoints"
        first, *others = (each.run.findings for each in done)
        outputs.write(first.merge(*others))
        if others:
            runs = read_all(folders)
            page = _trajectory(root, runs)
            print_lines(console, trajectory_lines(runs, console.width, details=outputs.details))
    print_failures(console, failures)
    if not complete:
        console.print(FAILED if failures else STOPPED, style="yellow")
    print_closing(console, line, root, page)
    return 0 if complete else PARTIAL if failures else INTERRUPTED


def _trajectory(root: Path, runs: "Runs") -> str:
    """Write the page of trajectories; return its path, or the command that installs pages."""
    from .._output_files import write
    from ..page import missing, render
    from ..reporting.trajectory_page import page_of_trajectory

    if missing():
        return NO_PAGE
    return str(write(root / TRAJECTORY, render(page_of_trajectory(runs))))


def _check_reading(loaded: "Loaded") -> None:
    if loaded.tokenizer is not None:
        return
    reads, batches = loaded.facts["reads"], "In Python, pass batches: gradlogz.probe(model, None, batches)."
    if reads == "text":
        problem = "the folder of the model has no tokenizer that transformers reads"
        remedy = f"Save it there: tokenizer.save_pretrained(folder). {batches}"
        raise InputValueError("probe", "model", problem, remedy)
    problem = f"the model reads {reads}; the command line has inputs for text and images only"
    raise InputValueError("probe", "model", problem, batches)


def _check_distribution(settings: Settings) -> None:
    """Raise if an option of engines is given without a folder of parts, or if the text cannot be read again."""
    if not settings.divided:
        settings.distribution.refuse("probe", "--resume")
    elif settings.text == STANDARD_INPUT:
        problem = "standard input can be read only once, but --resume continues with the same text"
        raise InputValueError("probe", "--text", problem, "Save the text to a file.")
