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
    (ValueError, "track: filter must be known; got 'kalman'.", lambda: track(filter="kalman")),
    (ValueError, "track: model must be known; got 'spin'.", lambda: track(SMALL, model="spin")),
    (ValueError, "track: sigma must be positive and finite; got -1.", lambda: track(SMALL, sigma=-1)),
    (
        ValueError,
        "track: model must be cv or turn where levels are fitted; got cv-ca.",
        lambda: track(SMALL, model="cv-ca", fit=True),
    ),
    (
        ValueError,
        "track: filter must be imm or gpb2 where tracks are smoothed; got gpb1.",
        lambda: track(SMALL, filter="gpb1", smooth=True),
    ),
    (
        ValueError,
        "track: turn_rate must be given with the model turn alone; got model 'cv'.",
        lambda: track(SMALL, turn_rate=3.0),
    ),
    (ValueError, f"track: {PATH} must have rows of text; got none.", of("")),
    (ValueError, f"track: {PATH} must have rows of text; got zeros, as in a binary file.", of(b"a\0b\n")),
    (ValueError, f"track: {PATH} must be a file that can be read; got what is no text in UTF-8.", of(b"\x93\xff\n")),
    (
        ValueError,
        f"track: {FOLDER}/none.csv must be a file that can be read; got No such file or directory.",
        lambda: track(FOLDER / "none.csv"),
    ),
    (ValueError, "track: there must be a detection; got 0 rows, 0 bad ones left out.", of(HEAD)),
    (ValueError, "track: there must be a detection; got 1 rows, 0 bad ones left out.", of(HEAD + "0,a,,\n")),
    (
        ValueError,
        "track: there must be a detection; got 0 rows, 1 bad ones left out.",
        of(HEAD + "0,a,b,c\n", skip_bad=True),
    ),
    (
        ValueError,
        "track: columns must be time, target, x, y and perhaps z; got no 'y'.",
        of("time,target,x\n0,a,1\n"),
    ),
    (
        ValueError,
        "track: columns must be time, target, x, y and perhaps z; got 'speed' too.",
        of("time,target,x,y,speed\n0,a,1,1,1\n"),
    ),
    (ValueError, "track: columns must have different names; got 'x' twice.", of("time,x,y,x\n0,1,1,1\n")),
    (
        ValueError,
        "track: columns must be of one length; got lengths 1, 2.",
        lambda: track({"time": [0, 1], "x": [0.0], "y": [0.0]}),
    ),
    (
        ValueError,
        "track: row 3, column x, must hold a number or nothing; got 'far'.",
        of(HEAD + "0,a,0,0\n1,a,far,0\n"),
    ),
    (ValueError, "track: row 2, column y, must hold a number or nothing; got '-inf'.", of(HEAD + "0,a,0,-inf\n")),
    (
        ValueError,
        "track: row 2, column time, must hold a number or an ISO timestamp; got 'noon'.",
        of(HEAD + "noon,a,0,0\n"),
    ),
    (ValueError, "track: row 2, column time, must hold a number or an ISO timestamp; got ''.", of(HEAD + ",a,0,0\n")),
    (ValueError, "track: row 2, column target, must name a target; got ' '.", of(HEAD + "0, ,0,0\n")),
    (ValueError, "track: row 3 must have 4 cells; got 3.", of(HEAD + "0,a,0,0\n1,a,0\n")),
    (
        ValueError,
        "track: row 4, column time, must be later than row 2 of its target; got '0' after '0'.",
        of(HEAD + "0,a,0,0\n0,b,0,0\n0,a,0,0\n"),
    ),
    (
        ValueError,
        "track: row 4, column time, must be later than row 3 of its target; got '1' after '2'.",
        of(HEAD + "0,a,0,0\n2,a,0,0\n1,a,0,0\n"),
    ),
    (
        ValueError,
        f"track: {FOLDER}/d.parquet must be parquet; got another format.",
        lambda: track(given("time,x,y\n", "d.parquet")),
    ),
    (
        ImportError,
        "track: polars must be installed to read parquet; got no polars.",
        without("polars", lambda: track(given("", "d.parquet"))),
    ),
    (
        ImportError,
        "track: polars must be installed to write parquet; got no polars.",
        without("polars", lambda: write_table(track(SMALL, sigma=1.0), FOLDER / "t.parquet")),
    ),
    (
        ValueError,
        "track: a target must have three rows to fit levels; got fewer in each.",
        lambda: track({"time": [0], "x": [0.0], "y": [0.0]}, fit=True),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
