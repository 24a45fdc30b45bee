"""Run folders and folders of parts may come from strangers: nothing outside of them is read, written or removed."""

import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file
from test_a_run_is_written_whole_or_not_at_all import run_of
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz._errors import InputError
from gradlogz._parquet import read_parquet
from gradlogz.engine import run_items
from gradlogz.engine.work_folder import DAY
from gradlogz.probing.measurement_file import kept_measurement
from gradlogz.probing.runs.run_folder import FINDINGS, PARQUET, REPLICATES, RUN, STATISTICS, read_run, write_run
from gradlogz.tracking.run_tracking import track


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", run_of(1))
    return tmp_path / "run"


def replaced(file, kind):
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"endless": "/dev/zero", "missing": "/none"}.get(kind, kind))


@pytest.mark.parametrize("kind", ["pipe", "endless", "missing"])
@pytest.mark.parametrize("name", [RUN, FINDINGS, PARQUET, REPLICATES])
def test_pipes_and_links_in_a_run_are_refused(run, name, kind):
    replaced(run / name, kind)
    with pytest.raises(InputError, match=name):
        read_run(run)
    assert len(read_run(run, strict=False).findings.rows) == len(run_of(1).findings.rows)


def test_a_link_to_a_good_file_is_refused(run, tmp_path):
    shutil.copy(run / FINDINGS, tmp_path / "other.json")
    replaced(run / FINDINGS, tmp_path / "other.json")
    with pytest.raises(InputError, match=FINDINGS):
        read_run(run)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_statistics_are_a_file(run, kind):
    replaced(run / STATISTICS, kind)
    with pytest.raises(InputError, match="has no statistics"):
        kept_measurement(run, [])


@pytest.mark.parametrize("name", ["items", "inputs", "joined", "work.json", "events.jsonl", ".lock"])
def test_links_in_a_folder_of_parts_are_refused(tmp_path, name):
    work, other = tmp_path / "work", tmp_path / "other"
    run_items(len, {"a": "one"}, folder=work)
    shutil.move(work / name, other)
    (work / name).symlink_to(other)
    hidden = other / ".profile.host.1" if other.is_dir() else other
    if other.is_dir():
        hidden.write_text("mine")
        os.utime(hidden, (0, 0))
    before = hidden.read_bytes()
    with pytest.raises(InputError, match=rf"{name} in the folder .* is a link"):
        run_items(len, {"a": "one"}, folder=work)
    assert hidden.read_bytes() == before


def test_hidden_files_of_others_are_kept(tmp_path):
    run_items(len, {"a": "one"}, folder=tmp_path)
    mine = [tmp_path / "items" / name for name in (".gitignore", ".profile.old")]
    abandoned = tmp_path / "items" / ".a.elsewhere.example.77"
    for file in (*mine, abandoned):
        file.write_text("x")
        os.utime(file, (time.time() - 2 * DAY,) * 2)
    (tmp_path / "items" / ".b.elsewhere.78").symlink_to(mine[0])
    assert run_items(len, {"a": "one"}, folder=tmp_path).states == {"a": 3}
    assert not abandoned.exists()
    assert all(file.exists() for file in mine)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_part_is_a_file(tmp_path, kind):
    run_items(len, {"a": "one"}, folder=tmp_path)
    (part,) = (tmp_path / "items").iterdir()
    replaced(part, kind)
    assert run_items(len, {"a": "one"}, folder=tmp_path).states == {"a": 3}
    assert part.is_file()


@pytest.mark.parametrize("kind", ["pipe", "missing"])
def test_the_page_of_a_run_is_a_file(run, kind):
    replaced(run / "report.html", kind)
    result = CliRunner().invoke(cli.application(), ["report", str(run)])
    assert result.exit_code == 2
    assert "report.html is a link, or no file" in result.output


def test_a_small_parquet_file_with_many_rows_is_refused(run, tmp_path):
    polars = pytest.importorskip("polars")
    zeros = polars.repeat(0, 4_000_000, dtype=polars.Int8, eager=True)
    bomb, spread = tmp_path / "bomb.parquet", tmp_path / "spread.parquet"
    polars.DataFrame({"time": zeros, "x": zeros, "y": zeros}).write_parquet(bomb)
    assert bomb.stat().st_size < 100_000
    with pytest.raises(InputError, match="declares 12,000,000 cells"):
        track(bomb, sigma=1.0, noise=1.0)
    numbers = polars.arange(1_000_000, eager=True)
    polars.DataFrame({"time": numbers, "x": numbers * 0.5, "y": numbers * 0}).write_parquet(spread)
    assert read_parquet(spread).shape == (1_000_000, 3)
    (run / FINDINGS).unlink()
    shutil.copy(bomb, run / PARQUET)
    with pytest.raises(InputError, match=FINDINGS):
        read_run(run, strict=False)


def test_a_column_of_ten_million_equal_numbers_is_read(tmp_path):
    polars = pytest.importorskip("polars")
    file = tmp_path / "constant.parquet"
    polars.DataFrame({"x": polars.repeat(1.5, 10_000_000, eager=True)}).write_parquet(file)
    assert file.stat().st_size < 100_000
    assert read_parquet(file).shape == (10_000_000, 1)


def test_a_small_parquet_file_with_long_lists_or_texts_is_refused(tmp_path):
    polars = pytest.importorskip("polars")
    file, text = tmp_path / "table.parquet", polars.Series("target", ["x" * 20_000])
    rows = polars.DataFrame({"time": polars.arange(6_000, eager=True)})
    for dtype in (polars.String, polars.Categorical, polars.Binary):
        rows.with_columns(text.gather([0] * 6_000).cast(dtype)).write_parquet(file)
        assert file.stat().st_size < 100_000
        with pytest.raises(InputError, match="declares 120,000,000 bytes of text"):
            track(file, sigma=1.0, noise=1.0)
    polars.DataFrame({"time": [[0] * 1000]}).write_parquet(file)
    with pytest.raises(InputError, match="has lists or records in the column 'time'"):
        track(file, sigma=1.0, noise=1.0)


def test_a_parquet_file_is_not_tried_with_modules_of_the_working_directory(tmp_path, monkeypatch):
    polars = pytest.importorskip("polars")
    polars.DataFrame({"x": [1.0]}).write_parquet(tmp_path / "table.parquet")
    for name in ("polars", "subprocess", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert read_parquet(tmp_path / "table.parquet").shape == (1, 1)
    assert not (tmp_path / "run").exists()


def test_a_parquet_file_that_cannot_be_tried_is_refused(tmp_path, monkeypatch):
    polars = pytest.importorskip("polars")
    polars.DataFrame({"x": [1.0]}).write_parquet(tmp_path / "table.parquet")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(InputError, match="cannot be started \\(No such file or directory\\)"):
        track(tmp_path / "table.parquet", sigma=1.0, noise=1.0)


@pytest.mark.parametrize("envelope", ["[]", '{"format": 1, "facts": {"item": "a"}, "classes": [], "content": []}'])
def test_nested_brackets_are_damage(run, tmp_path, envelope):
    text = envelope.replace("[]", "[" * 50_000 + "]" * 50_000)
    save_file({"0": torch.zeros(1)}, run / STATISTICS, metadata={"gradlogz": text})
    with pytest.raises(InputError, match="damaged"):
        kept_measurement(run, [])
    work = tmp_path / "work"
    run_items(len, {"a": "one"}, folder=work, facts={"b": 1})
    (work / "work.json").write_text(text)
    with pytest.raises(InputError, match=r"is damaged|has other work"):
        run_items(len, {"a": "one"}, folder=work, facts={"b": 1})


def test_a_file_that_ends_the_process_of_polars_is_refused(tmp_path):
    """One bit makes polars allocate 2^61 bytes, which ends its process."""
    polars = pytest.importorskip("polars")
    columns = {"time": [*range(6)], "target": ["a"] * 6, "x": [3.0 * t for t in range(6)]}
    file = tmp_path / "table.parquet"
    polars.DataFrame(columns | {"y": [-2.0 * t for t in range(6)]}).write_parquet(file)
    data = bytearray(file.read_bytes())
    data[412] ^= 1
    file.write_bytes(data)
    code = "import polars, sys; polars.read_parquet(sys.argv[1])"
    if subprocess.run([sys.executable, "-c", code, file], capture_output=True, check=False).returncode >= 0:
        pytest.skip("this release of polars survives it, or writes other bytes")
    with pytest.raises(InputError, match="is not a valid parquet file"):
        track(file, sigma=1.0, noise=1.0)


def test_the_root_of_the_file_system_is_no_run():
    with pytest.raises(InputError, match=r"no run folder|run\.json"):
        read_run("/")


def test_an_endless_table_is_refused():
    with pytest.raises(InputError, match="binary file"):
        track("/dev/zero", sigma=1.0, noise=1.0)
