"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write(path: Path | str, text: str) -> Path:
    """Write a file so that a reader sees the old one or the new one, whenever this is killed.

    The text goes to a hidden file beside it first, which then takes the name; an error leaves nothing behind.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
