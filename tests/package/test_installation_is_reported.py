"""tools/install.py says what pip does, how long it will take, and prints pip's output only if it fails."""

import subprocess
import sys
from pathlib import Path

import install

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "install.py"), "something", "5", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_line_names_the_package_and_the_time_left():
    lines = ["Looking in links\n", "Collecting torch==2.13.0\n", "  Downloading torch\n", "Collecting sympy>=1.13\n"]
    assert install.status("PyTorch", 60, 12, []) == "PyTorch: looking for packages; 12 s, about 48 s left"
    assert install.status("PyTorch", 60, 12, lines) == "PyTorch: 2 packages, now sympy>=1.13; 12 s, about 48 s left"
    lines.append("Installing collected packages: sympy, torch\n")
    assert install.status("PyTorch", 60, 70, lines) == "PyTorch: writing 2 packages; 70 s, longer than usual"


def test_success_is_one_line_and_failure_shows_the_output_of_pip():
    done = run("--dry-run", "--no-deps", "--no-index", "pip")  # installed already
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].startswith("something: done, ")
    failed = run("--no-index", "no-such-package-of-this-name")
    assert failed.returncode != 0
    assert "no-such-package-of-this-name" in failed.stderr
    assert "something: failed with status 1" in failed.stderr
