"""Pages that cannot be made, and figures that cannot be drawn: why, in one sentence."""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from gradlogz import compare, report
from gradlogz.commands import report as report_command
from gradlogz.probing import Finding, Findings
from gradlogz.probing.runs.run_folder import Run, write_run
from gradlogz.reporting.citations import parse
from support.error_form import each_of, refused

HERE = Path(tempfile.mkdtemp(prefix="gradlogz-errors-"))
atexit.register(shutil.rmtree, HERE, ignore_errors=True)

ROW = Finding("a", "entropy", "layer", 1, None, "entropy", 0.5, verdict="supported")
ONE = Findings({"a": {}}, [ROW])
TWO = Findings({"a": {}, "b": {}}, [ROW])


def run_with(name, **files):
    place = HERE / name
    place.mkdir(exist_ok=True)
    for file, text in files.items():
        (place / f"{file}.json").write_text(text)
    return place


def without(package, call):
    with mock.patch.dict(sys.modules, {package: None}):
        call()


DRAWN = {"plotly": None, "plotly.graph_objects": None}


def without_plotly():
    with mock.patch.dict(sys.modules, DRAWN):
        ONE.plot("entropy")


def with_a_link_for_a_page():
    run = write_run(HERE / "linked", Run({"name": "a"}, {}, 0, "gradlogz probe a", {}, {}, ONE))
    (run / "report.html").unlink(missing_ok=True)
    (run / "report.html").symlink_to(HERE / "elsewhere.html")
    report_command.command(str(run))


ERRORS = [
    (ValueError, "report: --out", "link", with_a_link_for_a_page),
    (
        ValueError,
        "report: path",
        "findings",
        lambda: report(HERE / "none"),
    ),
    (
        ValueError,
        "report: path",
        "findings",
        lambda: report(run_with("bare")),
    ),
    (
        ValueError,
        "report: path",
        "readable",
        lambda: report(run_with("stopped", run="{}")),
    ),
    (
        ValueError,
        "report: path",
        "readable",
        lambda: report(run_with("damaged", findings='{"rows": [')),
    ),
    (
        ValueError,
        "report: source",
        "findings",
        lambda: report(run_with("empty", findings='{"rows": [], "claims": [], "tokens": [], "facts": {}}')),
    ),
    (ValueError, "report: source", "findings", lambda: report(TWO)),
    (
        TypeError,
        "report: result",
        "Verification",
        lambda: report(1),
    ),
    (
        ImportError,
        "report: jinja2",
        "installed",
        lambda: without("jinja2", lambda: report(ONE)),
    ),
    (ValueError, "compare: sources", "runs", lambda: compare([ONE])),
    (ValueError, "Findings.plot: by", "layer", lambda: ONE.plot("entropy", by="depth")),
    (ValueError, "Findings.plot: model", "models", lambda: TWO.plot("entropy")),
    (
        ValueError,
        "Findings.plot: quantity",
        "sink",
        lambda: ONE.plot("entropy", "sink"),
    ),
    (
        ValueError,
        "Findings.plot: quantity",
        "head",
        lambda: ONE.plot("entropy", by="head"),
    ),
    (
        ValueError,
        "citations: text",
        "BibTeX",
        lambda: parse("@book{a01,\n  year = {2001},\n}\n@book{a01,\n  year = {2001},\n}\n"),
    ),
    (ImportError, "Findings.plot: plotly", "installed", without_plotly),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
