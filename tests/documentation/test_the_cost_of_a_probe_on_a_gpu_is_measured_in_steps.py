"""benchmarks/probe_cost_gpu.py in its small form, on the CPU: a limit loses no row, and the tables take the file."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    return imported("probe_cost_gpu")


def test_a_limit_loses_no_row_and_the_next_call_continues(cost, monkeypatch, tmp_path):
    file, passes, measured = tmp_path / "probe_cost_gpu.json", cost.passes, []

    def cut(model, shape, *options):
        if len(measured) == 2:
            raise cost.LimitError
        measured.append(shape)
        return passes(model, shape, *options)

    monkeypatch.setattr(cost, "passes", cut)
    with cost.limited(600):
        cost.Stages(file, small=True, continues=False).shapes()
    assert len(json.loads(file.read_text())["rows"]) == 2

    monkeypatch.setattr(cost, "passes", passes)
    cost.Stages(file, small=True, continues=True).shapes()
    table = json.loads(file.read_text())
    shapes = [cost.Shape(*(row[name] for name in cost.Shape._fields)) for row in table["rows"]]
    assert shapes[:2] == measured
    assert len(shapes) == len({*shapes}) == len({*map(cost.tiny, [cost.SMALL, *cost.FITTED, *cost.HELD_OUT])})
    assert all(row["ratio"] > 0 for row in table["rows"])
    assert {row["use"] for row in table["rows"]} == {"fitted", "held out"}


def test_every_stage_runs_and_the_tables_are_filled(cost, monkeypatch, tmp_path):
    stages = cost.Stages(tmp_path / "probe_cost_gpu.json", small=True, continues=False)
    monkeypatch.setattr(cost, "FITTED", cost.FITTED[:6])
    for name in cost.STAGES:
        getattr(stages, name)()
    assert stages.table["failed"] == []
    assert stages.table["1 B"]["reason without draws"] == ""
    tables = imported("tables")
    monkeypatch.setattr(tables, "PROBE_COST", stages.file)
    for table in (tables.probe_cost, tables.probe_memory, tables.probe_of_a_billion_tokens):
        assert tables.NOT_MEASURED not in table()
    assert "judging that run" in tables.probe_memory()
    assert "draws" in tables.probe_memory()
