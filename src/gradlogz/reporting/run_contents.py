"""The run that a page is made from: of one model, from a run folder, read leniently, or from findings.

A page is made from what is there: findings that are whole are shown even where the rest of the run is not, and the page
says so.

Read next: findings_page.py, ../probing/runs/run_folder.py (the reader).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import InputValueError
from ..probing.runs.findings import Findings
from ..probing.runs.run_folder import Run, read_run
from .findings_wording import Declarations

Source = str | os.PathLike[str] | Findings


class RunContents(NamedTuple):
    """A run of one model, by the model's name and that of its folder, which is empty for findings alone."""

    name: str
    run: Run
    folder: str = ""

    @property
    def findings(self) -> Findings:
        """Rows, claims and tokens."""
        return self.run.findings

    @property
    def declarations(self) -> Declarations:
        """What the predictions of the run declare."""
        return self.run.findings.declarations

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the model."""
        return self.findings.facts[self.name]


def contents_of(source: Source, call: str) -> RunContents:
    """A run folder or findings of one model; refused where there is no row and no claim."""
    if isinstance(source, Findings):
        run, folder = Run({}, {}, None, "", {}, {}, source, version=""), ""
    else:
        run, folder = read_run(source, strict=False, call=call), Path(source).expanduser().absolute().name
    findings = run.findings
    models = list(findings.facts)
    if len(models) != 1 or not (findings.rows or findings.claims):
        fact = f"{len(models)} models" if len(models) != 1 else f"neither rows nor claims of {models[0]}"
        remedy = "Compare several as several." if len(models) != 1 else "Make the run again; this one measured nothing."
        raise InputValueError(call, "source", f"a page must have findings of one model, got {fact}", remedy)
    return RunContents(models[0], run, folder)
