"""Atomic writing of files, and a check of the packages that pages need."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path | str) -> Iterator[Path]:
    """A hidden temporary file in the same folder, which replaces `path` at the end; an error removes it."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path | str, text: str) -> Path:
    """Write a file atomically: a reader sees the old text or the new one, even if this process is killed.

    The text first goes to a hidden file in the same folder, which then replaces `path`.
    """
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8")
    return Path(path)


def missing() -> str | None:
    """Name of the first package that pages need and that is not installed; None if all are."""
    return next((name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None), None)
