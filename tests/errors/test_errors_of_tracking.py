"""track says which file, row, column or option is wrong."""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from gradlogz import track
from gradlogz.tracking import write_table
from support.error_form import each_of, refused

FOLDER = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
HEAD = "time,target,x,y\n"


def given(text, name="d.csv"):
    path = FOLDER / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def of(text, **options):
    return lambda: track(given(text), **options)


def without(name, call):
    def refuse():
        with mock.patch.dict(sys.modules, {name: None}):
            call()

    return refuse


SMALL = {"time": [0, 1, 2], "x": [0.0, 1.0, 2.0], "y": [0.0, 0.0, 0.1]}
PATH = f"{FOLDER}/d.csv"
ERRORS = [
    (ValueError, "track: filter", "kalman", lambda: track(filter="kalman")),
    (ValueError, "track: model", "spin", lambda: track(SMALL, model="spin")),
    (ValueError, "track: sigma", "positive", lambda: track(SMALL, sigma=-1)),
    (
        ValueError,
        "track: model",
        "fitted",
        lambda: track(SMALL, model="cv-ca", fit=True),
    ),
    (
        ValueError,
        "track: filter",
        "smoother",
        lambda: track(SMALL, filter="gpb1", smooth=True),
    ),
    (
        ValueError,
        "track: turn_rate",
        "model",
        lambda: track(SMALL, turn_rate=3.0),
    ),
    (ValueError, "track: detections", "empty", of("")),
    (ValueError, "track: detections", "binary", of(b"a\0b\n")),
    (ValueError, "track: detections", "UTF-8", of(b"\x93\xff\n")),
    (
        ValueError,
        "track: detections",
        "No such file",
        lambda: track(FOLDER / "none.csv"),
    ),
    (ValueError, "track: detections", "0 rows", of(HEAD)),
    (ValueError, "track: detections", "1 rows", of(HEAD + "0,a,,\n")),
    (
        ValueError,
        "track: detections",
        "1 skipped",
        of(HEAD + "0,a,b,c\n", skip_bad=True),
    ),
    (
        ValueError,
        "track: columns",
        "missing",
        of("time,target,x\n0,a,1\n"),
    ),
    (
        ValueError,
        "track: columns",
        "speed",
        of("time,target,x,y,speed\n0,a,1,1,1\n"),
    ),
    (ValueError, "track: columns", "twice", of("time,x,y,x\n0,1,1,1\n")),
    (
        ValueError,
        "track: columns",
        "length",
        lambda: track({"time": [0, 1], "x": [0.0], "y": [0.0]}),
    ),
    (
        ValueError,
        "track: detections",
        "empty",
        of(HEAD + "0,a,0,0\n1,a,far,0\n"),
    ),
    (ValueError, "track: detections", "empty", of(HEAD + "0,a,0,-inf\n")),
    (
        ValueError,
        "track: detections",
        "timestamp",
        of(HEAD + "noon,a,0,0\n"),
    ),
    (ValueError, "track: detections", "timestamp", of(HEAD + ",a,0,0\n")),
    (ValueError, "track: detections", "target", of(HEAD + "0, ,0,0\n")),
    (ValueError, "track: detections", "4 cells", of(HEAD + "0,a,0,0\n1,a,0\n")),
    (
        ValueError,
        "track: detections",
        "target",
        of(HEAD + "0,a,0,0\n0,b,0,0\n0,a,0,0\n"),
    ),
    (
        ValueError,
        "track: detections",
        "target",
        of(HEAD + "0,a,0,0\n2,a,0,0\n1,a,0,0\n"),
    ),
    (
        ValueError,
        "track: detections",
        "parquet",
        lambda: track(given("time,x,y\n", "d.parquet")),
    ),
    (
        ImportError,
        "track: polars",
        "installed",
        without("polars", lambda: track(given("", "d.parquet"))),
    ),
    (
        ImportError,
        "track: polars",
        "installed",
        without("polars", lambda: write_table(track(SMALL, sigma=1.0), FOLDER / "t.parquet")),
    ),
    (
        ValueError,
        "track: detections",
        "levels",
        lambda: track({"time": [0], "x": [0.0], "y": [0.0]}, fit=True),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
