"""Pages that cannot be made, and figures that cannot be drawn: why, in one sentence."""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from gradlogz import compare, report
from gradlogz.probing import Finding, Findings
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


ERRORS = [
    (
        ValueError,
        f"report: a run must be a folder with run.json and findings.json; got {HERE / 'none'}, which is no folder.",
        lambda: report(HERE / "none"),
    ),
    (
        ValueError,
        f"report: a run must be a folder with run.json and findings.json; got {HERE / 'bare'}, which holds neither.",
        lambda: report(run_with("bare")),
    ),
    (
        ValueError,
        "report: findings.json must be readable; got no such file.",
        lambda: report(run_with("stopped", run="{}")),
    ),
    (
        ValueError,
        "report: findings.json must be readable; got damaged, JSONDecodeError.",
        lambda: report(run_with("damaged", findings='{"rows": [')),
    ),
    (
        ValueError,
        "report: a page must have findings of one model; got neither rows nor claims of empty.",
        lambda: report(run_with("empty", findings='{"rows": [], "claims": [], "tokens": [], "facts": {}}')),
    ),
    (ValueError, "report: a page must have findings of one model; got 2 models.", lambda: report(TWO)),
    (
        TypeError,
        "report: result must be Findings, the folder of a run, Simulation, Phases, Tracks, Verification; got int.",
        lambda: report(1),
    ),
    (
        ImportError,
        "report: jinja2 and plotly must be installed to make a page; got no jinja2.",
        lambda: without("jinja2", lambda: report(ONE)),
    ),
    (ValueError, "compare: there must be two runs or more; got 1.", lambda: compare([ONE])),
    (ValueError, "Findings.plot: by must be 'layer' or 'head'; got 'depth'.", lambda: ONE.plot("entropy", by="depth")),
    (ValueError, "Findings.plot: model must name one of the models; got None.", lambda: TWO.plot("entropy")),
    (
        ValueError,
        "Findings.plot: quantity must be one that a layer has; got 'sink' of entropy.",
        lambda: ONE.plot("entropy", "sink"),
    ),
    (
        ValueError,
        "Findings.plot: quantity must be one that a head has; got 'entropy' of entropy, which is of whole layers.",
        lambda: ONE.plot("entropy", by="head"),
    ),
    (
        ValueError,
        "citations: an entry must be simple BibTeX; got line 4.",
        lambda: parse("@book{a01,\n  year = {2001},\n}\n@book{a01,\n  year = {2001},\n}\n"),
    ),
    (ImportError, "Findings.plot: plotly must be installed; got none.", without_plotly),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
