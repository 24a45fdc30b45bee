"""Benchmarks of a GPU run in a small form on a CPU, and tables are made of the rows that have been measured."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parents[2]
SECTIONS = ["packed", "masks", "forward", "decoding"]


def test_every_section_of_attention_runs_and_writes_nothing(tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "benchmarks" / "attention_gpu.py", *SECTIONS, "--tiny", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.partition(",")[0] for line in done.stdout.splitlines() if ": {" in line]
    assert {name: rows.count(name) for name in SECTIONS} == {"packed": 4, "masks": 6, "forward": 2, "decoding": 2}
    assert not list(tmp_path.iterdir())


def test_no_section_begins_after_the_limit(tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "benchmarks" / "attention_gpu.py", "forward", "--tiny", "--limit", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no time is left for forward" in done.stdout


@pytest.mark.parametrize("count", [1, 2])
def test_tables_are_made_of_the_first_rows(tmp_path, monkeypatch, count):
    results = tmp_path / "benchmarks" / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", results)
    measured = json.loads((results / "attention_gpu.json").read_text())
    times = {"batch": 1.0, "8 x 512": 1.2, "100 to 1000": 1.5}
    measured["packed"] = [{"head size": 64, "causal": False, "forward, ms": times, "with backward, ms": times}] * 4
    cut = {name: part[:count] if isinstance(part, list) else part for name, part in measured.items()}
    (results / "attention_gpu.json").write_text(json.dumps(cut))
    monitored = json.loads((results / "monitor_gpu.json").read_text())
    (results / "monitor_gpu.json").write_text(json.dumps(monitored | {"rows": monitored["rows"][:count]}))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    rows = {name: tables.TABLES[f"gpu {name}"]().count("\n") - 1 for name in ("ratios", "training", "masks", "packed")}
    assert rows == {"ratios": count, "training": count, "masks": count, "packed": 2 * count}
    assert tables.TABLES["gpu"]().count("\n") - 1 == 2 * count
    assert tables.TABLES["monitor"]().count("H200") == count
