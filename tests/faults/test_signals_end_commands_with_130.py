"""SIGINT and SIGTERM, sent to real processes, end every command with status 130 and without a traceback.

A probe and a sweep write the results so far; every other command leaves no file, whole or half.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_a_run_is_written_whole_or_not_at_all import run_of

from gradlogz.probing.runs.run_folder import read_run, write_run
from support.saved_models import gpt2, save

# The command runs until `function` is called, prints a line, and waits there for a signal.
WAITING = """
import importlib, signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have told its children to ignore
module, _, name = sys.argv.pop(1).rpartition(".")
module = importlib.import_module(module)


def waiting(*args, **options):
    print("waiting", flush=True)
    time.sleep(60)


setattr(module, name, waiting)
from gradlogz.cli import main

sys.argv[0] = "gradlogz"
main()
"""
# Each batch of the text waits for a signal after it is measured.
PROBING = """
import signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)
from gradlogz.probing import run_probe

statistics_of = run_probe.statistics_of


def slow(*args):
    result = statistics_of(*args)
    print("measured", flush=True)
    time.sleep(0.5)
    return result


run_probe.statistics_of = slow
from gradlogz.cli import main

sys.argv[0] = "gradlogz"
main()
"""
COMMANDS = {
    "verify": (["--out", "new.html"], "gradlogz.verification.program.verify"),
    "report": (["run", "--out", "new.html"], "gradlogz.reporting.findings_page.rendered"),
    "compare": (["run", "other", "--out", "new.html"], "gradlogz.reporting.comparison_page.page_of_runs"),
    "simulate": (["--out", "new.html"], "gradlogz.simulation.run_simulation.simulate"),
    "track": (["--out", "new.html", "--json", "new.json"], "gradlogz.tracking.run_tracking.track"),
}
INT, TERM = (pytest.param(number, id=number.name) for number in (signal.SIGINT, signal.SIGTERM))
LONG_INT, LONG_TERM = (
    pytest.param(number, id=number.name, marks=pytest.mark.long) for number in (signal.SIGINT, signal.SIGTERM)
)


def ended(code, words, cwd, number):
    """Start a command, send it a signal at its first line, and return its status and standard error."""
    command = [sys.executable, "-c", code, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline()
        time.sleep(0.2)  # so that it waits
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
    return process.returncode, errors


@pytest.mark.parametrize("number", [LONG_INT, TERM])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_ends_a_command(tmp_path, name, number):
    write_run(tmp_path / "run", run_of(1))
    write_run(tmp_path / "other", run_of(2))
    words, function = COMMANDS[name]
    before = sorted(p.name for p in tmp_path.iterdir())
    status, errors = ended(WAITING, [function, name, *words], tmp_path, number)
    assert status == 130, errors
    assert "Traceback" not in errors
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("number", [LONG_INT, TERM])
def test_a_signal_ends_a_probe_after_its_batch(tmp_path, number):
    save(gpt2(), tmp_path / "model")
    lines = [json.dumps({"text": f"{i} the quick brown fox jumps over the lazy dog " * 20}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    words = ["probe", "model", "--text", "text.jsonl", "--only", "entropy", "--draws", "0", "--out", "run"]
    status, errors = ended(PROBING, [*words, "--tokens", "0", "--length", "16"], tmp_path, number)
    assert status == 130, errors
    assert "Traceback" not in errors
    run = read_run(tmp_path / "run", strict=False)
    assert not run.complete
    assert 0 < run.counts["tokens"]
    assert (tmp_path / "run" / "report.html").is_file()


SWEEP = """
import signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)
from gradlogz.simulation import parameter_sweep


run_batch = parameter_sweep.run_batch


def slow(batch):
    points = run_batch(batch)
    print("point", flush=True)
    time.sleep(0.5)
    return points


parameter_sweep.run_batch = slow
from gradlogz.cli import main

sys.argv[0] = "gradlogz"
main()
"""


@pytest.mark.parametrize("number", [INT, LONG_TERM])
def test_a_signal_ends_a_sweep_and_keeps_its_points(tmp_path, number):
    words = ["simulate", "--sweep", "dim=2|3|4|5|6|7|8|9", "--tokens", "20", "--steps", "5", "--out", "phases.html"]
    words += ["--engine", "process"]
    status, errors = ended(SWEEP, words, tmp_path, number)
    assert status == 130, errors
    assert "Traceback" not in errors
    assert [p.name for p in tmp_path.iterdir()] == ["phases.html"]
