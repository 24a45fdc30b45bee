"""docs/design.md names every module of the package, and every file that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradlogz"
PAGE = (ROOT / "docs" / "design.md").read_text().replace("\\_", "_")
NAMED = set(re.findall(r"\b(?:[\w.]+/)*_*\w+\.(?:pyi?|cu)\b", PAGE))


def test_every_module_is_named():
    files = [path for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    names = {name.rpartition("/")[2] for name in NAMED}
    assert not [str(path.relative_to(PACKAGE)) for path in files if path.name not in names]


def test_every_file_that_is_named_exists():
    there = {path.name for folder in ("src", "tests", "tools") for path in (ROOT / folder).rglob("*.*")}
    assert not {name for name in NAMED if name.rpartition("/")[2] not in there}
    whole = [name for name in NAMED if name.startswith(("src/", "tests/", "tools/"))]
    assert not [name for name in whole if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_that_docstrings_name_exist(path):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    texts = "\n".join(filter(None, map(ast.get_docstring, nodes)))
    named = re.findall(r"(?<![\w/.*])(?:[\w.]+/)*\w+\.(?:py|cu|md)\b", texts)
    assert not [name for name in named if not any((base / name).exists() for base in (path.parent, PACKAGE, ROOT))]
