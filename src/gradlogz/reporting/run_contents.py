"""The run of one model that a page shows, from a run folder or from findings.

Run folders are read leniently: findings are shown even if other files of the run are damaged or missing, and the page
lists what is missing.

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
    """A run of one model.

    name: name of the model. folder: name of the run folder, empty for findings.
    """

    name: str
    run: Run
    folder: str = ""

    @property
    def findings(self) -> Findings:
        """Rows, claims and tokens of the run."""
        return self.run.findings

    @property
    def declarations(self) -> Declarations:
        """Declaration of each prediction of the run, by name."""
        return self.run.findings.declarations

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of the model."""
        return self.findings.facts[self.name]


def contents_of(source: Source, call: str) -> RunContents:
    """Read a run folder, or wrap findings of one model; an error if there is neither a row nor a claim."""
    if isinstance(source, Findings):
        run, folder = Run({}, {}, None, "", {}, {}, source, version=""), ""
    else:
        run, folder = read_run(source, strict=False, call=call), Path(source).expanduser().absolute().name
    findings = run.findings
    models = list(findings.facts)
    if len(models) != 1 or not (findings.rows or findings.claims):
        several = len(models) != 1
        wrong_count = f"source has findings of {len(models)} models, but a page shows one"
        problem = wrong_count if several else f"source has no findings of {models[0]}"
        remedy = "Make one page per model, or compare their runs." if several else "Run the probe again."
        raise InputValueError(call, "source", problem, remedy)
    return RunContents(models[0], run, folder)
