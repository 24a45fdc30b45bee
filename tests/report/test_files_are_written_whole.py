"""A file is there whole or not at all, whenever the writing of it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gradlogz._output_files import write

SLOW = """
import signal, sys
from gradlogz import _output_files as writing
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have told its children to ignore
def slow(handle):
    print("written", flush=True)
    import time
    time.sleep(60)
writing.os.fsync = slow
writing.write(sys.argv[1], "new" * 1000)
"""


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    assert write(path, "ñew") == path
    assert path.read_text(encoding="utf-8") == "ñew"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    with subprocess.Popen([sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        assert path.read_text() == "old", "not yet"
        writer.send_signal(signal.SIGKILL)
    assert path.read_text() == "old"


def test_an_interrupt_in_the_middle_leaves_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as writer:
        writer.stdout.readline()
        time.sleep(0.1)
        writer.send_signal(signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
