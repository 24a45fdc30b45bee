"""Files that are there whole or not at all, and what pages need and is not installed."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path | str) -> Iterator[Path]:
    """A hidden file beside the one named, which takes its name at the end; an error leaves nothing behind."""
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
    """Write a file so that a reader sees the old one or the new one, whenever this is killed.

    The text goes to a hidden file beside it first, which then takes the name; an error leaves nothing behind.
    """
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8")
    return Path(path)


def missing() -> str | None:
    """What pages need and is not installed."""
    return next((name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None), None)
