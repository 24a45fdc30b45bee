"""The command line refuses options that cannot be used, before anything is computed."""

import importlib.util
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from torch import nn

from gradlogz._output_files import check_file, write
from gradlogz.commands import verify
from gradlogz.commands.engine_options import EngineOptions
from gradlogz.commands.outputs import check_drawing, check_files
from gradlogz.commands.probe import _check_reading
from gradlogz.commands.track import check_detections
from gradlogz.probing.corpus.readers import corpus_of
from gradlogz.probing.inside.loading import Loaded
from support.error_form import each_of, refused

HERE = Path(__file__).parent
PIXELS = SimpleNamespace(model_input_names=["pixel_values"])


def without_plotly():
    find = importlib.util.find_spec
    with mock.patch.object(importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name)):
        check_drawing("track")


def read_only_file():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.touch(0o444)
        check_file("track", "--out", path)


def with_a_pipe():
    path = Path(tempfile.mkdtemp()) / "pipe"
    os.mkfifo(path)
    check_detections(str(path))


ERRORS = [
    (
        ValueError,
        "track: --out",
        "written",
        lambda: check_file("track", "--out", HERE),
    ),
    (ValueError, "track: --out", "name", lambda: check_file("track", "--out", "a\0b")),
    (ValueError, "track: --out", "did not write", lambda: check_file("track", "--out", __file__)),
    (ValueError, "track: --out", "permission", read_only_file),
    (ValueError, "track: --json", "same file", lambda: check_files("track", {"--out": "new", "--json": "./new"})),
    (RuntimeError, "write: path", "written", lambda: write("no/such/page.html", "text")),
    (
        ValueError,
        "verify: --json",
        "written",
        lambda: verify.command(json="no/such/verdicts.json"),
    ),
    (ImportError, "track: plotly", "installed", without_plotly),
    (
        ValueError,
        "track: detections",
        "read",
        lambda: check_detections("no/such/detections.csv"),
    ),
    (
        ValueError,
        "track: detections",
        "pipe",
        with_a_pipe,
    ),
    (
        ValueError,
        "verify: --only",
        "statement",
        lambda: verify.command(only="no such statement"),
    ),
    (
        ValueError,
        "probe: model",
        "images",
        lambda: _check_reading(Loaded(nn.Linear(8, 8), None, "whisper", {"reads": "sound"})),
    ),
    (
        ValueError,
        "probe: model",
        "tokenizer",
        lambda: _check_reading(Loaded(nn.Linear(8, 8), None, "gpt2", {"reads": "text"})),
    ),
    (
        ValueError,
        "simulate: --engine",
        "--sweep",
        lambda: EngineOptions("ray", None, None, False, None).refuse("simulate", "--sweep"),
    ),
    (
        ValueError,
        "simulate: --restart",
        "--resume",
        lambda: EngineOptions(None, None, None, True, None).check("simulate"),
    ),
    (
        ValueError,
        "probe: texts",
        "input",
        lambda: corpus_of(PIXELS, None),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)


def test_standard_output_and_no_file_are_not_refused():
    for path in (None, "-"):
        check_files("verify", {"--json": path})
