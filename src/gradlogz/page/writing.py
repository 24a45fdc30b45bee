"""Files that are there whole or not at all, and what can be known before they are made."""

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


def check_file(call: str, flag: str, path: Path | str) -> None:
    """Refuse, before anything is computed, a file that could not be written after it."""
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        fact = "a folder" if path.is_dir() else "no such folder" if not path.parent.is_dir() else "no permission"
        raise ValueError(f"{call}: {flag} must name a file that can be written; got {path}, {fact}. Name another.")


def check_drawing(call: str) -> None:
    """Refuse to begin with a page that could not be drawn."""
    if (name := missing()) is not None:
        remedy = "Install it with: pip install 'gradlogz[report]'."
        raise ImportError(f"{call}: {name} must be installed to make a page; got no {name}. {remedy}")


def missing() -> str | None:
    """What pages need and is not installed."""
    return next((name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None), None)
