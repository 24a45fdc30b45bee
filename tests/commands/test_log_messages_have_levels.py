"""Log messages of the package: silent in programs that do not ask, on standard error of commands from a level on."""

import logging
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradlogz import cli
from gradlogz.commands.logs import Level, logged
from gradlogz.engine import LocalProcesses, run_items
from support.engine_work import Item, killed_once, moments

SWEEP = ["simulate", "--dim", "1", "--tokens", "30", "--steps", "5", "--sweep", "beta=0.1:1:2,tau=0.1:1:20"]
SWEEP += ["--engine", "process", "--resume", "parts", "--out", "page.html"]
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) gradlogz(\.\w+)+: .+")


def run(*words):
    return CliRunner().invoke(cli.application(), words)


def test_every_command_has_the_option():
    for command in cli.application().registered_commands:
        assert "--log-level" in run(command.name, "--help").output, command.name


def test_messages_are_those_from_a_level_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = logging.getLogger("gradlogz").handlers.copy()
    shown = run(*SWEEP, "--log-level", "info")
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stderr.splitlines() if "gradlogz" in line]
    assert all(LINE.fullmatch(line) for line in lines)
    assert "3 items, of which 0 are finished" in lines[0]
    assert re.search(r"batch-00001 finished in [\d.]+ s \(2 of 3, \d+ s left\)", lines[2])
    assert not [line for line in run(*SWEEP).stderr.splitlines() if LINE.fullmatch(line)]
    assert run(*SWEEP, "--log-level", "loud").exit_code == 2
    assert logging.getLogger("gradlogz").handlers == before


def test_a_damaged_part_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*SWEEP).exit_code == 0
    (damaged, *_) = sorted((tmp_path / "parts" / "items").glob("batch-00001-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = run(*SWEEP)
    assert again.exit_code == 0
    assert f"WARNING gradlogz.engine.work_folder: {damaged} was cut or changed" in again.stderr


def test_a_worker_that_dies_is_a_warning(tmp_path, caplog):
    items = {f"item-{i}": Item(i, str(tmp_path)) for i in range(3)}
    with caplog.at_level(logging.INFO, "gradlogz"):
        states = run_items(killed_once, items, engine=LocalProcesses(1)).states
    assert states.keys() == items.keys()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["a process died; 1 items that it may have computed run alone"]


def failing(item):
    if item.seed == 1:
        raise ArithmeticError("no \x1b[2J number")
    return moments(item)


def test_a_part_that_fails_is_a_warning_with_a_picture_of_its_control_characters(capsys):
    with logged(Level.WARNING):
        run_items(failing, {f"item-{i}": Item(i) for i in range(2)})
    (line,) = capsys.readouterr().err.splitlines()
    assert LINE.fullmatch(line)
    assert line.endswith("item-1 failed (2 of 2): ArithmeticError: no ␛[2J number")


@pytest.mark.parametrize("configured", [False, True])
def test_programs_ask_for_messages(configured):
    code = "import gradlogz, logging; from gradlogz.engine import run_items\n"
    code += "logging.basicConfig(level='INFO')\n" * configured + "run_items(len, {'a': 'b'})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert ("INFO:gradlogz.engine.work_loop:a finished in" in result.stderr) == configured
