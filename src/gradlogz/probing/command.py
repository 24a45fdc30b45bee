"""gradlogz probe: load a model, pass a text through it, write a run, show the verdicts.

Read next: run_probe.py (what is measured), run_folder.py (what is written).
"""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from .._errors import InputValueError, sentence
from ..page import check_file, write
from .corpus.images import images, reads_images
from .corpus.text import documents
from .findings import Findings
from .findings_file import findings_to_json
from .inside.loading import Loaded, load
from .run_folder import Run, check_place, write_run
from .run_probe import Measurement, chosen, evaluate, measure

SOURCES = {"text": "the prose that comes with Python", "reactions": "textbook reactions"}  # read by default
RUNS = "runs"  # where runs are written unless another folder is named
INTERRUPTED = 130  # what a shell expects of a command that was


def probe_command(
    name: str,
    *,
    text: str | None,
    tokens: int | None,
    length: int | None,
    only: list[str] | None,
    out: str | None,
    json: str | None,
    device: str | None,
    dtype: str | None,
    seed: int,
    twin: float,
    allow_pickle: bool,
    allow_remote_code: bool,
    finish: Callable[[Path], str] | None = None,
) -> int:
    """The command, with its exit status: 0, or 2 with a sentence about what must be otherwise.

    finish: what is done with the folder of the run at the end, and a line about it.
    """
    from rich.console import Console

    console = Console(stderr=json == "-")
    place = Path(out) if out is not None else Path(RUNS) / _label(name)
    with _Refusals() as refusals:
        check_place(place)
        if json not in (None, "-"):
            check_file("probe", "--json", json)
        chosen(only)
        with console.status(f"Loading {name}"):
            loaded = load(
                name, device=device, dtype=dtype, allow_pickle=allow_pickle, allow_remote_code=allow_remote_code
            )
        _check_reading(loaded, text)
        found: Any = (
            images(text, loaded.tokenizer)
            if text is not None and reads_images(loaded.tokenizer)
            else documents(text, reads=loaded.facts["reads"])
        )
        measured = measure(
            loaded.model, loaded.tokenizer, found, name=_label(name), facts=loaded.facts, tokens=tokens or None,
            length=length, predictions=only, twin=twin, seed=seed, progress=sys.stderr.isatty(),
        )  # fmt: skip
        with console.status("Judging"):
            findings = evaluate(measured, predictions=only)
        write_run(place, _run(measured, findings, seed, text))
        if json == "-":
            print(findings_to_json(findings))
        elif json is not None:
            write(json, f"{findings_to_json(findings)}\n")
    if refusals.met:
        return 2
    console.print(findings)
    console.print(measured.report.words(), style="dim", highlight=False)
    if not measured.complete:
        console.print("Interrupted: the numbers are of the part that was read.", style="yellow")
    console.print(f"Run: {place}", highlight=False, soft_wrap=True)
    if finish is not None:
        console.print(finish(place), highlight=False, soft_wrap=True, markup=False)
    return 0 if measured.complete else INTERRUPTED


class _Refusals:
    """Within this context what the package refuses is one line on standard error; other errors are as ever."""

    def __init__(self) -> None:
        self.met = False

    def __enter__(self) -> "_Refusals":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        from rich.console import Console

        self.met = isinstance(error, (ValueError, TypeError, ImportError, RuntimeError)) and "; got " in str(error)
        if self.met:
            Console(stderr=True, soft_wrap=True).print(str(error), style="red", highlight=False, markup=False)
        return self.met


def _label(name: str) -> str:
    """What a model is called in tables and folders: the last part of a path or of a name of the hub."""
    return Path(name).name or name


def _check_reading(loaded: Loaded, text: str | None) -> None:
    if loaded.tokenizer is None:
        fact = f"one that reads {loaded.facts['reads']}, without a tokenizer or an image processor"
        remedy = "In Python, gradlogz.probe(model, None, batches) takes the inputs themselves."
        raise InputValueError(sentence("probe", "the model must read text or images", fact, remedy))
    if reads_images(loaded.tokenizer) and text is None:
        remedy = "Pass its path as --text."
        raise InputValueError(sentence("probe", "a model of images must be given a folder of them", "none", remedy))


def _run(measured: Measurement, findings: Findings, seed: int, text: str | None) -> Run:
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
