"""The rows of an experiment do not depend on the engine, nor on a kill, and a run that fails costs no other run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from experiments.specific_heat import experiment
from experiments.workers import FailedRunsError, Workers
from gradlogz._errors import InputValueError
from gradlogz.engine import InProcess, LocalProcesses, engine_of

ROOT = Path(__file__).parents[2]
SETTINGS = experiment.Settings(primes=(7,), seeds=1, steps=100)
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from experiments.specific_heat import experiment
from experiments.workers import Workers
from gradlogz.engine import LocalProcesses
if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = experiment.Settings(primes=(7,), seeds=1, steps=100)
    results = experiment.run(settings, Path(sys.argv[1]), Workers(LocalProcesses(1)))
    Path(sys.argv[1], "results.json").write_text(json.dumps(results["runs"]))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return experiment.run(SETTINGS, tmp_path_factory.mktemp("process"), Workers(InProcess()))["runs"]


@pytest.mark.parametrize("name", ["processes", "slurm"])
def test_rows_do_not_depend_on_the_engine(rows, name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    engine = engine_of("experiment", name, workers=3, folder=tmp_path)
    assert experiment.run(SETTINGS, tmp_path, Workers(engine))["runs"] == rows


def test_a_killed_experiment_continues_to_the_same_rows(rows, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "work")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    items = tmp_path / "work" / "parts" / "items"
    while len(list(items.glob("[!.]*"))) < 1 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path.name for path in items.glob("[!.]*")}
    assert 1 <= len(finished) < len(rows), "it was complete before it could be killed"
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    assert finished <= {path.name for path in items.glob("[!.]*")}
    assert json.loads((tmp_path / "work" / "results.json").read_text()) == json.loads(json.dumps(rows))


@dataclass(frozen=True)
class Settings:
    """Settings of an experiment."""

    size: int = 3


def row_of(folder, item):
    (folder / f"trained-{item}").touch()
    if item == 2:
        raise ArithmeticError("it diverged")
    return {"item": item, "steps": {0: None, 5: 1.5}}


def test_a_failed_run_is_named_and_the_others_are_kept(tmp_path):
    function, items = partial(row_of, tmp_path), {f"run-{i}": i for i in (3, 2, 1)}
    with pytest.raises(FailedRunsError, match=r"^run-2 failed: ArithmeticError: it diverged$"):
        Workers().rows(function, items, Settings(), tmp_path)
    del items["run-2"]
    (tmp_path / "trained-1").unlink()
    known = Workers(LocalProcesses(1)).rows(function, items, Settings(), tmp_path)
    assert known == [{"item": i, "steps": {0: None, 5: 1.5}} for i in (3, 1)]
    assert not (tmp_path / "trained-1").exists()
    with pytest.raises(InputValueError, match=r'settings was \{"size": 3\} and is \{"size": 4\}'):
        Workers().rows(function, items, Settings(4), tmp_path)
