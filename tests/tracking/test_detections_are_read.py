"""What is read is what stands in the file; what is wrong is named, and left out if asked, and nothing else is."""

import math
from itertools import pairwise

import polars
import pytest
import torch

from gradlogz.tracking.detections import read

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
    with pytest.raises(ValueError, match=r"row 2, column time.*row 1"):
        read(tensors)


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
    assert [bad.row for bad in found.bad] == [3, 4, 6, 7, 8, 9, 10, 12]
    assert found.names == ["a", "c"]
    assert found.label == ["0", "2", "4", "5", "1"]
    assert found.target.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_as_few_rows_as_can_be_are_left_out_of_times_that_go_back(seed):
    """Against all subsets."""
    g = torch.Generator().manual_seed(seed)
    times = torch.randint(0, 6, (9,), generator=g).tolist()
    found = read({"time": times, "x": [0.0] * 9, "y": [0.0] * 9}, skip_bad=True)
    assert bool((found.time.diff() > 0).all())
    best = 0
    for subset in range(1 << 9):
        kept = [t for i, t in enumerate(times) if subset >> i & 1]
        if all(a < b for a, b in pairwise(kept)):
            best = max(best, len(kept))
    assert len(found.time) == best
