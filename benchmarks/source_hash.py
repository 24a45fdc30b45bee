"""SHA-256 of what a Python file computes: of its syntax tree without comments, docstrings, names of files and lines."""

import ast
import hashlib
from pathlib import Path

# Fields that only some versions of Python have, or that hold no code.
IGNORED = {"type_params", "type_comment", "kind", "ctx"}


def source_hash(path: Path) -> str:
    """Return the hash; equal for two files that differ in comments, docstrings and layout alone."""
    return hashlib.sha256(repr(_form(ast.parse(path.read_text()))).encode()).hexdigest()


def _form(node: object) -> object:
    if isinstance(node, list):
        return [_form(item) for item in node if not _is_docstring(item)]
    if isinstance(node, ast.AST):
        fields = [(name, _form(value)) for name, value in ast.iter_fields(node) if name not in IGNORED]
        return type(node).__name__, fields
    return node


def _is_docstring(node: object) -> bool:
    """Return whether a statement is a constant alone, which computes nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
