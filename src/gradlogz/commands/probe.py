"""gradlogz probe: load a model, pass a text through it, write a run and its page, show the verdicts.

Read next: ../probing/run_probe.py (what is measured), ../probing/runs/run_folder.py (what is written).
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._input_errors import InputValueError
from .outputs import RUN_PAGE, check_file, terminal, write_json

if TYPE_CHECKING:
    from ..probing.inside.loading import Loaded
    from ..probing.run_probe import Measurement
    from ..probing.runs.findings import Findings
    from ..probing.runs.run_folder import Run

SOURCES = {"text": "the prose that comes with Python", "reactions": "textbook reactions"}  # read by default
RUNS = "runs"  # where runs are written unless another folder is named
INTERRUPTED = 130  # what a shell expects of a command that was


def command(
    model: Annotated[
        str, typer.Argument(help="minilm, smollm2, rxnmapper, rxnfp, a folder, a GGUF file, or a name of the hub.")
    ] = "minilm",
    text: Annotated[
        str | None,
        typer.Option(
            help="What the model reads: a file, a folder, or - for standard input; by default the prose that comes "
            "with Python, or reactions for a model that reads those. Of images a folder.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="About how many tokens to read; 0 reads all.")] = 20_000,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a window at most; by default 1024, or the context.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this prediction; may be given several times.", show_default=False),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The folder of the run; by default runs/MODEL.", show_default=False)
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Write the findings as JSON to this file; - is standard output.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1 …; by default the GPU if there is one.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 (the default), float64, bfloat16 or float16.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random twin, and of which documents are read.")] = 0,
    twin: Annotated[float, typer.Option(help="The part of the tokens that a random twin reads; 0 for none.")] = 0.1,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights, as plain tensors only.")
    ] = False,
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="Run code that comes with a model.")
    ] = False,
) -> int:
    """What a trained transformer says about the theory: every prediction, head by head, with nulls and intervals.

    Ends with a table of verdicts, a folder that holds all that was measured, and a page in it. Ctrl-C finishes the
    batch that is under way and keeps what was measured.
    """
    from ..probing.corpus.readers import corpus_of
    from ..probing.inside.loading import load
    from ..probing.run_probe import chosen, evaluate, measure
    from ..probing.runs.findings_file import findings_to_json
    from ..probing.runs.run_folder import check_place, write_run

    console = terminal(json)
    place = Path(out) if out is not None else Path(RUNS) / _label(model)
    check_place(place)
    check_file("probe", "--json", json)
    chosen(only)
    with console.status(f"Loading {model}"):
        loaded = load(model, device=device, dtype=dtype, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code)
    _check_reading(loaded)
    corpus = corpus_of(loaded.tokenizer, text, reads=loaded.facts["reads"])
    measured = measure(
        loaded.model, loaded.tokenizer, corpus, name=_label(model), facts=loaded.facts, tokens=tokens or None,
        length=length, predictions=only, twin=twin, seed=seed, progress=sys.stderr.isatty(),
    )  # fmt: skip
    with console.status("Judging"):
        findings = evaluate(measured, predictions=only)
    run = _run(measured, findings, seed, text)
    write_run(place, run)
    write_json(json, findings_to_json(findings))
    console.print(findings)
    console.print(measured.report.words(), style="dim", highlight=False)
    if not measured.complete:
        console.print("Interrupted: the numbers are of the part that was read.", style="yellow")
    console.print(f"Run: {place}", highlight=False, soft_wrap=True)
    console.print(_page_line(place), highlight=False, soft_wrap=True, markup=False)
    return 0 if measured.complete else INTERRUPTED


def _page_line(run: Path) -> str:
    """Write the page of a run into its folder; a line that says where it is, or how to get one."""
    from ..page import missing, write
    from ..reporting import report

    if missing():
        return "Page: none; pip install 'gradlogz[report]', then gradlogz report."
    return f"Page: {write(run / RUN_PAGE, report(run))}"


def _label(name: str) -> str:
    """What a model is called in tables and folders: the last part of a path or of a name of the hub."""
    return Path(name).name or name


def _check_reading(loaded: "Loaded") -> None:
    if loaded.tokenizer is None:
        fact = f"one that reads {loaded.facts['reads']}, without a tokenizer or an image processor"
        remedy = "In Python, gradlogz.probe(model, None, batches) takes the inputs themselves."
        raise InputValueError("probe", "model", f"the model must read text or images, got {fact}", remedy)


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
