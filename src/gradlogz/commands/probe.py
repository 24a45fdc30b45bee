"""gradlogz probe: measure a model on a text, write a run and its page, print the verdicts.

Read next: ../probing/run_probe.py (the measurement), ../probing/runs/run_folder.py (the run).
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._input_errors import InputValueError
from .outputs import RUN_PAGE, check_file, print_closing, print_lines, terminal, write_json

if TYPE_CHECKING:
    from ..probing.inside.loading import Loaded
    from ..probing.run_probe import Measurement
    from ..probing.runs.findings import Findings
    from ..probing.runs.run_folder import Run

SOURCES = {"text": "topics of Python's built-in help", "reactions": "textbook reactions"}  # default texts
RUNS = "runs"  # default folder of runs
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def command(
    model: Annotated[
        str, typer.Argument(help="Model: minilm, smollm2, rxnmapper, rxnfp, a folder, a GGUF file or a Hub name.")
    ] = "minilm",
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
            help="Name of a prediction to test, such as ascent or tie; repeatable (default: all).",
            show_default=False,
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print the numbers of each claim in sentences, below its line.")
    ] = False,
    out: Annotated[str | None, typer.Option(help="Run folder (default: runs/MODEL).", show_default=False)] = None,
    json: Annotated[
        str | None,
        typer.Option(help="JSON file for the findings; - for standard output (default: none).", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device: cpu, cuda, cuda:1, … (default: GPU if available).", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Precision: float32, float64, bfloat16 or float16 (default: float32).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the baseline and of document sampling.")] = 0,
    baseline: Annotated[
        float,
        typer.Option("--baseline", help="Share of the text for the random-weights baseline; 0 for none."),
    ] = 0.1,
    draws: Annotated[
        int, typer.Option(min=0, help="Number of random models with the trained spectra; 0 for none.")
    ] = 20,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Allow reading pickled weights (as plain tensors).")
    ] = False,
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="Allow running code shipped with the model.")
    ] = False,
) -> int:
    """Test the theory of attention (Shim, 2022) on a trained transformer, head by head, with 95 % CIs and null models.

    Prints a table of verdicts and writes a run folder with an HTML page.

    Ctrl-C ends the run after the current batch; the results so far are written.
    """
    from ..probing.corpus.readers import corpus_of
    from ..probing.inside.loading import load
    from ..probing.run_probe import chosen, evaluate, measure
    from ..probing.runs.findings_file import findings_to_json
    from ..probing.runs.run_folder import check_place, write_run
    from ..probing.runs.statistics_file import write_statistics
    from ..reporting.findings_terminal import claim_lines
    from ..reporting.formatting import measured_line

    console = terminal(json)
    place = Path(out) if out is not None else Path(RUNS) / _label(model)
    check_place(place)
    check_file("probe", "--json", json)
    chosen(only)
    with console.status(f"Loading {model}"):
        loaded = load(model, device=device, dtype=dtype, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code)
    _check_reading(loaded)
    corpus = corpus_of(loaded.tokenizer, text, reads=loaded.facts["reads"])
    facts = loaded.facts | ({"synthetic_text": True} if text is None and loaded.facts["reads"] == "reactions" else {})
    measured = measure(
        loaded.model, loaded.tokenizer, corpus, name=_label(model), facts=facts, tokens=tokens or None,
        length=length, predictions=only, baseline=baseline, draws=draws, seed=seed, progress=sys.stderr.isatty(),
    )  # fmt: skip
    statistics = write_statistics(place, measured)  # first, so that a judgement that is killed can be repeated
    with console.status("Judging"):
        findings = evaluate(measured, predictions=only)
    run = _run(measured, findings, seed, text)
    write_run(place, run)
    if statistics is not None:
        statistics.unlink(missing_ok=True)
    write_json(json, findings_to_json(findings))
    page = page_of(place)  # files come first, so that a closed pipe costs no result
    name = measured.probed.name
    print_lines(console, claim_lines(findings, name, console.width, details=details))
    if not measured.complete:
        console.print("Interrupted: the results cover only the text read so far.", style="yellow")
    if details:
        console.print(measured.report.words(), style="dim", highlight=False)
    print_closing(console, f"{name}, {measured_line(findings.facts[name])}", place, page)
    return 0 if measured.complete else INTERRUPTED


def page_of(run: Path) -> str:
    """Write the page of a run into its folder; return its path, or the command that installs pages."""
    from ..page import missing, write
    from ..reporting import report

    if missing():
        return "none; pip install 'gradlogz[report]', then gradlogz report"
    return str(write(run / RUN_PAGE, report(run)))


def _label(name: str) -> str:
    """Name of a model in tables and folders: the last part of its path or Hub name."""
    return Path(name).name or name


def _check_reading(loaded: "Loaded") -> None:
    if loaded.tokenizer is None:
        problem = f"the model reads {loaded.facts['reads']}; the command line has inputs for text and images only"
        remedy = "In Python, pass batches: gradlogz.probe(model, None, batches)."
        raise InputValueError("probe", "model", problem, remedy)


def _run(measured: "Measurement", findings: "Findings", seed: int, text: str | None) -> "Run":
    from ..probing.runs.run_folder import Run

    report = measured.report
    counts = {name: getattr(report, name) for name in ("documents", "rows", "tokens", "padded", "windowed", "short")}
    return Run(
        model={"name": measured.probed.name, **measured.facts},
        text={"source": text or SOURCES.get(measured.facts["reads"], ""), "length": report.length},
        seed=seed,
        command=shlex.join(["gradlogz", *sys.argv[1:]]),
        counts=counts,
        times=measured.seconds,
        findings=findings,
        complete=measured.complete,
    )
