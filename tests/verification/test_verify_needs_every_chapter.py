"""With a chapter that cannot be imported `gradlogz verify` fails and names the chapter."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradlogz.verification import program

CHAPTERS = ["measures", "attention", "dynamics", "filters", "contrastive"]
FOLDER = Path(program.__file__).parent
NO_STATEMENTS = {"__init__", "definition", "program", "statement"}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_verify_fails_without_a_chapter(chapter):
    code = f"import sys; sys.modules['gradlogz.{chapter}'] = None; from gradlogz.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "verify"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"gradlogz.{chapter}" in result.stderr
    assert "hold" not in result.stdout


def test_every_file_of_statements_is_run():
    listed = {module.__name__.rsplit(".", 1)[-1] for module in program.MODULES}
    assert listed == {path.stem for path in FOLDER.glob("*.py")} - NO_STATEMENTS


@pytest.mark.parametrize("module", program.MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_file_of_statements_has_some(module):
    assert [one for one in program.statements() if one.check.__module__ == module.__name__]
