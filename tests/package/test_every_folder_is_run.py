"""`make test` is two runs of pytest; together they run every folder of tests, each folder once."""

import importlib.util
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
specification = importlib.util.spec_from_file_location("conftest_of_all", TESTS / "conftest.py")
conftest = importlib.util.module_from_spec(specification)  # `import conftest` may find that of another folder
specification.loader.exec_module(conftest)
FOLDERS = sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_in_one_of_the_two_runs(folder):
    runs = ({"checked": True, "unchecked": False}, {"checked": False, "unchecked": True})
    assert [conftest.left_out(TESTS / folder / "test_anything.py", **run) for run in runs].count(True) == 1


def test_without_an_option_nothing_is_left_out():
    assert not any(conftest.left_out(TESTS / folder, checked=False, unchecked=False) for folder in FOLDERS)


def test_a_new_folder_is_run_with_checks():
    assert conftest.left_out(TESTS / "new" / "test_new.py", checked=False, unchecked=True)
    assert not conftest.left_out(TESTS / "new" / "test_new.py", checked=True, unchecked=False)


def test_folders_that_are_run_without_checks_exist_and_say_why():
    assert set(conftest.UNCHECKED) <= set(FOLDERS)
    assert all(conftest.UNCHECKED.values())


def test_the_makefile_names_no_folder():
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)
    assert [line.split("--dist worksteal ")[1] for line in recipe[1].splitlines()] == [
        "--typecheck",
        "--no-typecheck",
    ]


def test_modules_that_are_not_checked_exist():
    source = TESTS.parent / "src"
    assert all((source / f"{name.replace('.', '/')}.py").is_file() for name in conftest.COMPILED)
