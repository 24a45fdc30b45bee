"""One boundary for all commands: an InputError is one line on standard error and exit status 2, and nothing else is.

Each command is run with the chapter that it calls replaced by one that raises, and with input of its own that is bad.
"""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz._errors import InputError, InputRuntimeError, InputTypeError, InputValueError, MissingPackageError
from support.error_form import FORM

CALLS = {  # words that reach the chapter, and the function of the chapter that is called
    "verify": ([], "gradlogz.verification.program.statements"),
    "probe": (["--out", "run"], "gradlogz.probing.run_probe.measure"),
    "report": (["run"], "gradlogz.reporting.run_contents.contents_of"),
    "compare": (["one", "two"], "gradlogz.reporting.comparison_page.read_all"),
    "merge": (["one", "two", "--out", "run"], "gradlogz.probing.runs.run_folder.read_run"),
    "simulate": ([], "gradlogz.simulation.run_simulation.simulate"),
    "track": ([], "gradlogz.tracking.run_tracking.track"),
    "doctor": ([], "gradlogz.diagnosis.machine.diagnose"),
}
BAD = {
    "verify": ["--only", "no such statement"],
    "probe": ["--only", "luck", "--out", "run"],
    "report": ["no such run"],
    "compare": ["one"],
    "merge": ["one", "--out", "run"],
    "simulate": ["--sweep", "gamma=1:2:3"],
    "track": ["none.csv"],
    "doctor": ["--json", "no such folder/result.json"],
}
EACH = pytest.mark.parametrize("name", [command.name for command in cli.application().registered_commands])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(name, words):
    return CliRunner().invoke(cli.application(), [name, *words])


def failing(name, error, monkeypatch):
    """Run a command whose chapter raises this error."""

    def fail(*args, **options):
        raise error

    words, function = CALLS[name]
    monkeypatch.setattr(function, fail)
    return run(name, words)


@EACH
@pytest.mark.parametrize("kind", [InputError, InputValueError, InputTypeError, InputRuntimeError, MissingPackageError])
def test_bad_input_is_one_line_on_standard_error_and_exits_with_2(name, kind, monkeypatch):
    result = failing(name, kind("call", "name", "name must be [known], got\n'x'", "Name another."), monkeypatch)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "call: name must be [known], got 'x'. Name another."
    assert result.stdout.strip() == ""


@EACH
@pytest.mark.parametrize("kind", [ValueError, TypeError, ImportError, RuntimeError, OSError, KeyError])
def test_any_other_error_keeps_its_traceback_and_exits_with_1(name, kind, monkeypatch):
    error = kind("a number must be finite")
    result = failing(name, error, monkeypatch)
    assert result.exit_code == 1
    assert result.exception is error
    assert "must be finite" not in result.output


@pytest.mark.parametrize("tokens", ["1000000000000", "1000000000000000000"])
def test_too_little_memory_is_one_line_and_exits_with_2(tokens):
    result = run("simulate", ["--dim", "9", "--tokens", tokens])
    assert result.exit_code == 2, result.exception
    (line,) = result.stderr.splitlines()
    assert "too little memory" in line


@EACH
def test_bad_input_of_its_own_is_refused_in_one_line(name):
    result = run(name, BAD[name])
    assert result.exit_code == 2
    assert result.stdout.strip() == ""
    (line,) = result.stderr.splitlines()
    assert FORM.fullmatch(line), line


@EACH
def test_an_interrupt_is_silent_and_exits_with_130(name, monkeypatch):
    result = failing(name, KeyboardInterrupt(), monkeypatch)
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_bug_in_a_filter_shows_its_traceback():
    code = """
import sys
from gradlogz.cli import main
from gradlogz.tracking import filtered_batches

def broken(*args, **options):
    raise ValueError("imm: shapes must match")

filtered_batches.FILTERS["imm"] = broken
sys.argv = ["gradlogz", "track"]
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "in broken" in result.stderr
    assert "ValueError: imm: shapes must match" in result.stderr


@pytest.mark.parametrize("words", [["simulate", "--list"], ["verify", "--only", "Eq. 4", "--json", "-"]], ids=" ".join)
def test_a_closed_pipe_is_silent(words):
    command = [sys.executable, "-m", "gradlogz", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        says = process.stderr.read()
    assert process.returncode == 1
    assert "Traceback" not in says
    assert "BrokenPipe" not in says
