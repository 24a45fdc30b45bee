"""track says which file, row, column or option is wrong."""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pandas

from gradlogz import track
from gradlogz.commands.track import columns_in, numbers_in
from gradlogz.tracking import frame_of, write_table
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


def without_memory():
    """A call in which the trial of a parquet file succeeds, and reading it does not."""
    with mock.patch("gradlogz.tracking.columns.read_parquet", side_effect=MemoryError):
        track(given("", "d.parquet"))


def levels_in(text, **options):
    """A call that reads noise levels from a file with this text."""
    return lambda: track(SMALL, levels=given(text, "levels.json"), **options)


def altered_levels(**values):
    return lambda: track(SMALL, levels=track(SMALL).levels._replace(**values))


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
    (ValueError, "track: detections", "first line", of("a," * 2**19)),
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
    (ValueError, "track: columns", "latitude", of("time,lon\n0,1\n")),
    (ValueError, "track: columns", "both", of("time,id,icao24,x,y\n0,a,b,1,1\n")),
    (ValueError, "track: columns", "rcs", of("time,x,y\n0,1,1\n", columns={"rcs": "x"})),
    (ValueError, "track: columns", "east", of("time,x,y\n0,1,1\n", columns={"x": "east"})),
    (ValueError, "track: columns", "unit", of("time,x,y\n0,1,1\n", columns={"x": "x:parsec"})),
    (ValueError, "track: columns", "unit", of("time,lat,lon\n0,1,1\n", columns={"latitude": "lat:m"})),
    (ValueError, "track: columns", "unit", of("time,x_km,y\n0,1,1\n")),
    (ValueError, "track: columns", "sigma_velocity", of("time,x,y,gs\n0,1,1,1\n", columns={"groundspeed": "gs"})),
    (ValueError, "track: columns", "'track'", of("time,x,y,gs\n0,1,1,1\n", sigma_velocity=1.0)),
    (ValueError, "track: columns", "'gs_kt'", of("time,x,y,gs_kt,track\n0,1,1,1,1\n", sigma_velocity=1.0)),
    (ValueError, "track: columns", "time", of("time,x_m,y_m,gs_kt,track\n0,1,1,1,1\n", sigma_velocity=1.0)),
    (ValueError, "track: detections", "negative", of("time,x,y,gs,track\n0,1,1,-1,1\n", sigma_velocity=1.0)),
    (ValueError, "track: detections", "360", of("time,x,y,gs,track\n0,1,1,1,361\n", sigma_velocity=1.0)),
    (ValueError, "track: sigma_velocity", "scenario", lambda: track(sigma_velocity=1.0)),
    (ValueError, "track: sigma_velocity", "positive", lambda: track(SMALL, sigma_velocity=0.0)),
    (ValueError, "track: columns", "sigma_y", of("time,x,y,sigma_x\n0,1,1,1\n")),
    (ValueError, "track: detections", "positive", of("time,x,y,sigma\n0,1,1,0\n")),
    (ValueError, "track: detections", "90", of("time,lat,lon\n0,91,1\n")),
    (ValueError, "track: detections", "360", of("time,lat,lon\n0,9,361\n")),
    (ValueError, "track: sigma", "coordinates", lambda: track(SMALL, sigma=(1.0, 2.0, 3.0))),
    (ValueError, "track: fit", "column", of("time,x,y,sigma\n0,1,1,1\n1,1,1,1\n2,1,1,1\n", fit=True)),
    (ValueError, "track: outliers", "probability", lambda: track(SMALL, outliers=1.5)),
    (TypeError, "track: detections", "dictionary", lambda: track([[0, 1, 2]])),
    (ValueError, "track: --column", "QUANTITY", lambda: columns_in(["x"])),
    (ValueError, "track: --sigma", "commas", lambda: numbers_in("a,b")),
    (ValueError, "frame_of: library", "excel", lambda: frame_of(track(SMALL), "excel")),
    (ImportError, "frame_of: pandas", "installed", without("pandas", lambda: frame_of(track(SMALL), "pandas"))),
    (ValueError, "track: columns", "twice", of("time,x,y,x\n0,1,1,1\n")),
    (ValueError, "track: columns", "twice", lambda: track({**SMALL, "X": [0.0, 1.0, 2.0]})),
    (ValueError, "track: columns", "twice", lambda: track(pandas.DataFrame([[0, 1, 1, 1]], columns=list("txyx")))),
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
        "parquet",
        lambda: track(given("time,x,y\n", "d.parquet")),
    ),
    (ValueError, "track: detections", "parquet", without_memory),
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
    (ValueError, "track: jitter", "positive", lambda: track(SMALL, jitter=-1.0)),
    (ValueError, "track: levels", "cannot be read", lambda: track(SMALL, levels=FOLDER / "none.json")),
    (ValueError, "track: levels", "JSON", levels_in("{")),
    (ValueError, "track: levels", "no noise levels", levels_in("{}")),
    (ValueError, "track: levels", "negative", altered_levels(noise=-1.0)),
    (ValueError, "track: levels", "numbers", altered_levels(durations=3.0)),
    (ValueError, "track: levels", "numbers", altered_levels(sigma=(1.0, 2.0))),
    (ValueError, "track: levels", "positive step", altered_levels(step=0.0)),
    (ValueError, "track: levels", "late", altered_levels(late=1.0, late_jitter=1.0, late_sigma=1.0)),
    (ValueError, "track: levels", "modes", altered_levels(durations=(1.0, 1.0, 1.0))),
    (ValueError, "track: levels", "sigma", levels_in("{}", sigma=1.0)),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
