"""What is read is what stands in the file; what is wrong is named, and left out if asked, and nothing else is."""

import math
from time import process_time

import numpy as np
import pandas
import polars
import pytest
import torch
import xarray

from gradlogz import track
from gradlogz._errors import InputError
from gradlogz.tracking import frame_of, table_of
from gradlogz.tracking.detections import read
from gradlogz.tracking.projection import SEMI_MAJOR, LocalPlane

GOOD = "time,target,x,y\n0,a,1,2\n0,b,5,6\n1,a,1.5,\n2,a,nan,3\n"


def wrote(tmp_path, text, name="d.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def same(one, two):
    assert one.names == two.names
    assert torch.equal(one.time, two.time)
    assert torch.equal(one.target, two.target)
    assert torch.equal(one.position.nan_to_num(nan=-1), two.position.nan_to_num(nan=-1))


def test_cells_may_be_missing_and_targets_interleaved(tmp_path):
    found = read(wrote(tmp_path, GOOD))
    assert found.names == ["a", "b"]
    assert found.time.tolist() == [0, 0, 1, 2]
    assert found.position[2, 0] == 1.5
    assert bool(found.position[2, 1].isnan())
    assert bool(found.position[3, 0].isnan())


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace(",", ";"),
        GOOD.replace(",", "\t"),
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("time,target,x,y", " Time, TARGET,x ,Y"),
        GOOD.replace("nan", "NA"),
        GOOD.replace("1,a", '"1","a"'),
        GOOD + "\n\n",
        GOOD.replace(",", "|"),
        "sep=;\n" + GOOD.replace(",", ";"),
        GOOD.replace(",", ";").replace("1.5", "1,5"),
        GOOD.replace("1,a,1.5,\n", "1,a,1.5,-\n").replace(",", "   "),
        GOOD.replace("time,target,x,y", "timestamp,icao24,East,north"),
    ],
)
def test_the_usual_forms_of_csv_are_one(tmp_path, text):
    same(read(wrote(tmp_path, text)), read(wrote(tmp_path, GOOD)))


def test_columns_and_parquet_are_read_as_csv_is(tmp_path):
    columns = {
        "time": [0, 0, 1, 2],
        "target": ["a", "b", "a", "a"],
        "x": [1.0, 5.0, 1.5, None],
        "y": [2, 6, math.nan, 3],
    }
    polars.DataFrame(columns, strict=False).write_parquet(tmp_path / "d.parquet")
    expected = read(wrote(tmp_path, GOOD))
    same(read(columns), expected)
    same(read(tmp_path / "d.parquet"), expected)
    tensors = {"time": torch.tensor([0, 0, 1, 2]), "x": torch.arange(4.0), "y": torch.arange(4.0)}
    assert read(tensors).time.tolist() == [0, 0, 1, 2]


def test_timestamps_are_seconds(tmp_path):
    text = "time,x,y\n2024-05-01T00:00:00Z,0,0\n2024-05-01 00:00:01.5+00:00,1,1\n2024-05-01T02:00:03+02:00,2,2\n"
    found = read(wrote(tmp_path, text))
    assert found.time.tolist() == [0, 1.5, 3]
    assert found.unit == "s"
    assert found.names == ["1"]
    frame = polars.DataFrame({"time": ["2024-05-01 00:00:00", "2024-05-01 00:00:01.5"], "x": [0, 1], "y": [0, 1]})
    frame.with_columns(polars.col("time").str.to_datetime()).write_parquet(tmp_path / "d.parquet")
    assert read(tmp_path / "d.parquet").time.tolist() == [0, 1.5]


BAD = """time,target,x,y
0,a,0,0
1,a,zero,0
1.5,a,0
2,a,2,0
,a,3,0
2,a,2.1,0
3,,3,0
3,b,3,inf
99,a,3,0
4,a,4,0
3,a,4,1
5,a,5,0
1,c,7,7
"""


def test_no_good_row_is_lost_and_every_bad_one_is_counted(tmp_path):
    found = read(wrote(tmp_path, BAD), skip_bad=True)
    assert [bad.row for bad in found.bad] == [3, 4, 6, 8, 9]
    assert found.names == ["a", "c"]
    assert found.label == ["0", "2", "2", "3", "4", "5", "99", "1"]
    assert found.row.tolist() == [2, 5, 7, 12, 11, 13, 10, 14]
    assert found.late == 2


# Tables ---------------------------------------------------------------------------------------------------------------

TABLE = {
    "time": [0, 0, 1, 2],
    "target": ["a", "b", "a", "a"],
    "x": [1.0, 5.0, 1.5, math.nan],
    "y": [2.0, 6, math.nan, 3],
}


@pytest.mark.parametrize(
    "table",
    [
        pandas.DataFrame(TABLE),
        pandas.DataFrame(TABLE).set_index("time"),
        pandas.DataFrame(TABLE).set_index(["time", "target"]),
        pandas.DataFrame(TABLE).set_index("time", drop=False),
        polars.DataFrame(TABLE),
        xarray.Dataset({name: ("row", column) for name, column in TABLE.items()}),
        np.array(
            list(zip(*TABLE.values(), strict=True)), dtype=[("time", "f8"), ("target", "U1"), ("x", "f8"), ("y", "f8")]
        ),
        {name: np.array(column) for name, column in TABLE.items()},
    ],
    ids=[
        "pandas",
        "pandas index",
        "pandas levels",
        "pandas index and column",
        "polars",
        "xarray",
        "structured",
        "numpy",
    ],
)
def test_tables_of_other_libraries_are_read(table):
    same(read(table), read(TABLE))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_numpy_and_pandas_are_seconds_in_every_resolution(unit):
    times = np.array(["2024-05-01T00:00:00", "2024-05-01T00:00:02", "2024-05-01T00:00:05"], f"datetime64[{unit}]")
    for column in (times, pandas.Series(times), pandas.Series(times).dt.tz_localize("Europe/Zurich")):
        found = read({"time": column, "x": [0.0, 1, 2], "y": [0.0, 1, 2]})
        assert found.time.tolist() == [0, 2, 5]
        assert found.unit == "s"
    gap = pandas.Series([times[0], pandas.NaT, times[2]])
    assert [bad.row for bad in read({"time": gap, "x": [0.0, 1, 2], "y": [0.0, 1, 2]}, skip_bad=True).bad] == [2]


@pytest.mark.parametrize(
    ("name", "choice"), [("time_ms", {}), ("Time [h]", {}), ("when", {"time": "when:min"}), ("time_s", {})]
)
def test_timestamps_are_seconds_whatever_the_unit_of_their_column(name, choice):
    times = ["2024-05-01T00:00:00Z", "2024-05-01T00:00:01Z", "2024-05-01T00:00:03Z"]
    for column in (times, pandas.Series(pandas.to_datetime(times))):
        found = read({name: column, "x": [0.0, 1, 2], "y": [0.0, 1, 2]}, columns=choice)
        assert found.time.tolist() == [0, 1, 3]
        assert found.unit == "s"


def test_times_with_and_without_a_zone_are_not_mixed():
    times = ["2024-05-01T00:00:00Z", "2024-05-01T00:00:01", "2024-05-01T00:00:02Z"]
    columns = {"time": times, "x": [0.0, 1, 2], "y": [0.0, 1, 2]}
    with pytest.raises(ValueError, match="row 2, column time must have a time zone"):
        read(columns)
    assert read(columns, skip_bad=True).time.tolist() == [0, 2]


def test_an_infinite_time_is_no_question_of_time_zones():
    for time in ([0, -math.inf, 2], ["0", "-inf", "2"], ["-inf", "1", "2"]):
        with pytest.raises(ValueError, match="column time must be a number or an ISO timestamp"):
            read({"time": time, "x": [0.0, 1, 2], "y": [0.0, 1, 2]})


@pytest.mark.parametrize("missing", [None, math.nan, np.float64("nan"), pandas.NA, pandas.NaT, "", "  "])
def test_a_missing_target_is_an_invalid_row(missing):
    columns = {"time": [0, 1, 2], "target": ["a", missing, "nan"], "x": [0.0, 1, 2], "y": [0.0, 1, 2]}
    with pytest.raises(ValueError, match="row 2, column target must be the name of a target"):
        read(columns)
    assert read(columns, skip_bad=True).names == ["a", "nan"]  # a text is a name


def test_a_row_without_a_detection_needs_no_standard_deviation():
    t = list(range(9))
    gap = {"time": t, "x": [0.1 * i if i != 4 else None for i in t], "y": [0.2 * i if i != 4 else None for i in t]}
    empty = {**gap, "sigma": [None if i == 4 else 1.0 + i for i in t]}
    full = {**gap, "sigma": [1.0 + i for i in t]}
    one, other = (track(each, noise=0.1, outliers=0) for each in (empty, full))
    assert one.levels.sigma == sorted(s for s in empty["sigma"] if s)[3]  # the lower median of those that are there
    assert bool((one.detections.sigma > 0).all())
    given = [i for i in t if i != 4]
    assert torch.equal(one.detections.sigma[given], other.detections.sigma[given])
    again = track(
        {**empty, "sigma": [one.levels.sigma if i == 4 else s for i, s in enumerate(empty["sigma"])]}, noise=0.1
    )
    assert torch.equal(one.filtered.mean.nan_to_num(), again.filtered.mean.nan_to_num())
    never = {
        "time": t,
        "x": t,
        "y": t,
        "z": [None] * 9,
        "sigma_x": [2.0] * 9,
        "sigma_y": [2.0] * 9,
        "sigma_z": [None] * 9,
    }
    assert read(never).sigma[:, 2].tolist() == [2.0] * 9
    half = {**full, "y": [None, *full["y"][1:]], "sigma": [None, *full["sigma"][1:]]}
    with pytest.raises(ValueError, match="row 1, column sigma must be positive"):  # x was detected
        read(half)
    with pytest.raises(ValueError, match="row 5, column sigma must be positive"):
        read({**empty, "sigma": [0.0 if i == 4 else 1.0 for i in t]})


def test_results_are_tables_of_the_same_libraries():
    found = track(TABLE, sigma=1.0)
    columns = table_of(found)
    for library in ("polars", "pandas", "xarray", "numpy"):
        frame = frame_of(found, library)
        assert type(frame).__module__.startswith(library)
        assert list(np.asarray(frame["target"])) == TABLE["target"]
        for name in ("x_filtered", "vy_filtered", "nis"):
            np.testing.assert_array_equal(np.array(frame[name], float), columns[name].numpy())
    for library in ("pandas", "numpy"):
        again = track(frame_of(found, library), sigma=1.0)  # other columns are not used
        assert torch.equal(again.filtered.mean.nan_to_num(), found.filtered.mean.nan_to_num())
        assert again.detections.unused


# Order ----------------------------------------------------------------------------------------------------------------


def test_rows_in_any_order_give_the_tracks_of_sorted_rows():
    g = torch.Generator().manual_seed(0)
    t = torch.rand(60, generator=g, dtype=torch.float64).cumsum(0)
    columns = {"time": t, "target": [f"T{i % 3}" for i in range(60)], "x": t + 1, "y": t.sin(), "rcs": t}
    order = torch.randperm(60, generator=g).tolist()
    mixed = {name: [list(column)[i] for i in order] for name, column in columns.items()}
    one, other = (table_of(track(each, sigma=0.1, smooth=True)) for each in (columns, mixed))
    assert [float(at) for at in other["time"]] == [float(at) for at in mixed["time"]]  # as in the input
    for name in ("x_filtered", "vy_smoothed", "nis", "probability_quiet"):
        torch.testing.assert_close(other[name], one[name][order], equal_nan=True, rtol=1e-9, atol=1e-9)


def test_two_sensors_at_one_time_are_two_detections_and_a_repeated_row_is_one():
    """Two detections of equal noise are one of half the variance at their mean, and repeated rows say nothing new."""
    t, x = [0.0, 1, 2, 3], [0.0, 1.1, 1.9, 3.2]
    both = {"time": [at for at in t for _ in "ab"], "x": [v + d for v in x for d in (-0.1, 0.1)], "y": [0.0] * 8}
    mean = {"time": t, "x": x, "y": [0.0] * 4}
    options = {"noise": 0.1, "turn_rate": 1.0, "model": "turn"}
    two, one = track(both, sigma=1.0, **options), track(mean, sigma=0.5**0.5, **options)
    assert two.detections.repeated == 0
    known = ~one.filtered.mean[-1].isnan()
    assert bool(known.all())
    torch.testing.assert_close(two.filtered.mean[-1], one.filtered.mean[-1], rtol=0, atol=2e-2)
    repeated = {name: [cell for cell in column for _ in "ab"] for name, column in mean.items()}
    again = track(repeated, sigma=0.5**0.5, **options)
    assert again.detections.repeated == 4
    assert torch.equal(again.filtered.mean.nan_to_num(), one.filtered.mean.nan_to_num())


def test_a_corrupt_cell_changes_no_other_target():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(400, generator=g, dtype=torch.float64).cumsum(0).tolist()
    columns = {"time": [i // 2 for i in range(400)], "target": ["a", "b"] * 200, "x": x, "y": [0.0] * 400}
    corrupt = {**columns, "x": [1e29 if i == 21 else v for i, v in enumerate(x)]}
    one, other = (table_of(track(each, sigma=1.0, noise=1.0)) for each in (columns, corrupt))
    for name in ("x_filtered", "x_deviation"):  # but for the levels, which are those of all targets
        torch.testing.assert_close(one[name][0::2], other[name][0::2], rtol=0, atol=0.1)


# Columns and units ----------------------------------------------------------------------------------------------------


def test_a_name_has_one_line_and_one_blank_for_several(tmp_path):
    found = read(wrote(tmp_path, 'x   [km],"Time\n[s]","y  [km]"\n1,0,2\n1.5,1,2.5\n'))
    assert found.position.tolist() == [[1000, 2000], [1500, 2500]]
    chosen = read({"a  clock": [0, 1], "x": [1, 2], "y": [1, 2]}, columns={"time": " A clock "})
    assert chosen.time.tolist() == [0, 1]


@pytest.mark.parametrize("header", ['"' + GOOD * 1000, " ".join("x" * 30_000) + ",x", "a" + " " * 100_000 + "1,x"])
def test_a_long_name_is_one_short_line(tmp_path, header):
    begun = process_time()
    with pytest.raises(InputError, match="the column 'time' is missing") as raised:
        read(wrote(tmp_path, header))
    assert len(str(raised.value)) < 200
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="there is no column 'clock'") as raised:
        read(wrote(tmp_path, header), columns={"time": "clock"})
    assert len(str(raised.value)) < 300
    assert process_time() - begun < 2


def test_many_columns_are_read(tmp_path):
    names = ",".join(f"c{i}" for i in range(50_000))
    found = read(wrote(tmp_path, f"time,x,y,{names}\n0,1,2" + "," * 50_000))
    assert len(found.unused) == 50_000


def test_columns_are_chosen_and_have_units(tmp_path):
    text = "ts,who,e,n\n0,a,1,2\n1000,a,1.5,2.5\n"
    choice = {"time": "ts:ms", "target": "who", "x": "e:km", "y": "n:ft"}
    found = read(wrote(tmp_path, text), columns=choice)
    assert found.time.tolist() == [0, 1]
    assert (found.unit, found.length, found.names) == ("s", "m", ["a"])
    assert found.position.tolist() == [[1000, 2 * 0.3048], [1500, 2.5 * 0.3048]]
    named = read(wrote(tmp_path, "time_ms,x [km],y_ft,Altitude (ft)\n0,1,2,10\n1000,1.5,2.5,20\n"))
    assert torch.equal(named.position[:, :2], found.position)
    assert named.position[:, 2].tolist() == [10 * 0.3048, 20 * 0.3048]
    unused = read(wrote(tmp_path, "time,x,y,altitude,rcs\n0,1,2,10,3\n"))
    assert unused.unused == ("altitude", "rcs")  # feet or metres: not known
    assert unused.axes == "xy"


def test_standard_deviations_by_coordinate_and_by_row_are_those_of_the_filter():
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 30, generator=g, dtype=torch.float64)
    columns = {"time": list(range(30)), "x": x.tolist(), "y": y.tolist()}
    by_axis = track(columns, sigma=(1.0, 3.0), noise=0.1)
    by_row = track({**columns, "sigma_x": [1.0] * 30, "sigma_y": [3.0] * 30}, noise=0.1)
    assert by_axis.levels.sigma == pytest.approx(5**0.5)
    torch.testing.assert_close(by_axis.model.R[0].diagonal(), torch.tensor([1.0, 9.0], dtype=torch.float64))
    torch.testing.assert_close(by_row.filtered.mean, by_axis.filtered.mean, equal_nan=True)
    torch.testing.assert_close(by_row.nis, by_axis.nis, equal_nan=True)
    # A row of very large noise is as good as none.
    hidden = track({**columns, "sigma": [1e9 if i == 20 else 1.0 for i in range(30)]}, noise=0.1)
    none = {**columns, **{axis: [None if i == 20 else c for i, c in enumerate(columns[axis])] for axis in "xy"}}
    expected = track({**none, "sigma": [1.0] * 30}, noise=0.1)
    torch.testing.assert_close(hidden.filtered.mean[-1], expected.filtered.mean[-1], rtol=1e-4, atol=1e-4)


# Latitude and longitude -----------------------------------------------------------------------------------------------


def test_latitudes_and_longitudes_become_metres_and_return(tmp_path):
    found = read(wrote(tmp_path, "time,icao24,lat,lon\n0,a,47.1,8.4\n1,a,47.2,8.5\n2,a,,8.6\n3,a,47.3,8.6\n"))
    assert found.length == "m"
    assert bool(found.position[2].isnan().all())
    latitude, longitude = found.plane.locate(found.position)
    torch.testing.assert_close(
        latitude[[0, 1, 3]], torch.tensor([47.1, 47.2, 47.3], dtype=torch.float64), atol=1e-11, rtol=0
    )
    torch.testing.assert_close(
        longitude[[0, 1, 3]], torch.tensor([8.4, 8.5, 8.6], dtype=torch.float64), atol=1e-11, rtol=0
    )


def test_distances_from_the_origin_are_those_on_the_ellipsoid():
    """Along a meridian the length is an integral; along the equator it is the angle times the radius."""
    plane, flattening = LocalPlane(47.3, 8.5), 1 / 298.257223563
    e2 = flattening * (2 - flattening)
    for degrees in (-5.0, 0.01, 1.0, 5.0):
        phi = torch.linspace(47.3, 47.3 + degrees, 20001, dtype=torch.float64).deg2rad()
        arc = torch.trapezoid(SEMI_MAJOR * (1 - e2) / (1 - e2 * phi.sin() ** 2) ** 1.5, phi)
        north = plane.project(torch.tensor(47.3 + degrees, dtype=torch.float64), torch.tensor(8.5, dtype=torch.float64))
        torch.testing.assert_close(north[1], arc, rtol=3e-6, atol=1e-6)
        assert abs(float(north[0])) < 1e-6
    equator = LocalPlane(0.0, 179.0)
    for degrees in (0.01, 1.0, 3.0):
        east = equator.project(
            torch.zeros((), dtype=torch.float64), torch.tensor(179.0 + degrees - 360, dtype=torch.float64)
        )
        assert float(east[0]) == pytest.approx(math.radians(degrees) * SEMI_MAJOR, rel=5e-6)


def test_a_plane_crosses_the_180th_meridian():
    longitude = torch.tensor([179.5, -179.5, 179.9, -179.9], dtype=torch.float64)
    plane = LocalPlane.of(torch.zeros(4, dtype=torch.float64), longitude)
    xy = plane.project(torch.zeros(4, dtype=torch.float64), longitude)
    assert float(xy.abs().max()) < 1.2e5
    torch.testing.assert_close(plane.locate(xy)[1], longitude, atol=1e-10, rtol=0)


def test_tracks_of_latitudes_have_latitudes():
    t = [10.0 * i for i in range(20)]
    columns = {"time": t, "lat": [47 + 1e-3 * at / 10 for at in t], "lon": [8 + 2e-3 * at / 10 for at in t]}
    table = table_of(track(columns, sigma=30.0))
    assert table["latitude_filtered"][-1] == pytest.approx(columns["lat"][-1], abs=1e-5)
    assert table["longitude_filtered"][-1] == pytest.approx(columns["lon"][-1], abs=1e-5)
    assert table["vy_filtered"][-1] == pytest.approx(111.2 / 10, rel=5e-3)  # a thousandth of a degree in 10 s


def test_the_name_of_a_chosen_column_may_end_in_a_unit():
    columns = {"Uhr [ms]": [0, 1000], "Ost (km)": [0.0, 1.5], "nord_ft": [0.0, 100.0]}
    rows = read(columns, columns={"time": "Uhr [ms]", "x": "Ost (km)", "y": "nord_ft:m"})
    assert rows.time.tolist() == [0.0, 1.0]
    assert rows.position.tolist() == [[0.0, 0.0], [1500.0, 100.0]]  # a unit after the colon goes first
    assert (rows.unit, rows.length) == ("s", "m")
