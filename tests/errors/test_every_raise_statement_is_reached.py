"""No error without a test: every raise statement of the package names its call and argument, and some refusal hits it.

The statements are found by walking the syntax of the package; the refusals are those listed by the files beside this.
"""

import ast
import importlib
from pathlib import Path

from gradlogz import _errors
from support.error_form import PACKAGE, refused

CHAPTERS = ["commands", "_errors.py", "_output_files.py", "_paths.py", "special", "kernels", "measures"]
CHAPTERS += ["attention", "dynamics", "filters", "contrastive", "simulation", "tracking", "reporting", "probing"]
CHAPTERS += ["integrations"]
# The fault of another process, not of an argument: tests/faults/test_errors_of_one_process_are_raised_in_all.py
OF_PROCESSES = {"OtherProcessError"}


def sources():
    """The files of the package in which errors are raised for its users."""
    for chapter in CHAPTERS:
        path = PACKAGE / chapter
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def raise_statements():
    """(file, first line, last line) of every raise statement, and its syntax."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            raised = getattr(getattr(node, "exc", None), "func", getattr(node, "exc", None))
            other = isinstance(raised, ast.Name) and (raised.id.startswith("_") or raised.id in OF_PROCESSES)
            # A private signal is no error, and an error that is raised again is another statement's.
            again = isinstance(node, ast.Raise) and (node.exc is None or isinstance(node.exc, ast.Attribute))
            if isinstance(node, ast.Raise) and not other and not again:
                yield (path.relative_to(PACKAGE).as_posix(), node.lineno, node.end_lineno), node


def test_every_error_names_its_call_and_argument():
    for site, node in raise_statements():
        assert isinstance(node.exc, ast.Call), site
        assert isinstance(node.exc.func, ast.Name), site
        assert issubclass(getattr(_errors, node.exc.func.id), _errors.InputError), site
        assert len(node.exc.args) == len(("call", "argument", "problem", "remedy")), site


def test_every_raise_statement_is_reached():
    files = sorted(Path(__file__).parent.glob("test_errors_of_*.py"))
    hit = {refused(refusal) for file in files for refusal in importlib.import_module(file.stem).ERRORS}
    missed = [
        (file, first)
        for (file, first, last), _ in raise_statements()
        if not any(file == where and first <= line <= last for where, line in hit)
    ]
    assert not missed, f"raised by no test: {missed}"
