"""Numba's cache of compiled kernels on disk, used only if it is this user's own and as it was written.

    NAME.nbi, NAME.1.nbc, ...     index and machine code of a kernel, by numba: pickles, which run what they contain
    NAME.sha256                   their hashes and that of the sources of all kernels, written after them

Numba loads whatever is there: a damaged file breaks every call, and the file of another kernel ends the process. An
entry counts only if the folder and its files belong to this user and the hashes agree: numba itself notices changes of
the file of a kernel, not of the files that it imports. Otherwise it is removed where possible, and the kernel compiled
again. Any other trouble with the cache means: compile without it.

Read next: workers.py (which compiles).
"""

import hashlib
import json
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from numba.core.caching import FunctionCache

from .._paths import is_own


class CacheEntry(NamedTuple):
    """The files of one kernel in the cache."""

    folder: Path
    name: str

    @property
    def files(self) -> list[Path]:
        """Index and machine code, in the order of their names."""
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [p for p in paths if p.name.startswith(f"{self.name}.") and p.suffix in (".nbi", ".nbc")]

    @property
    def hashes(self) -> Path:
        """File of the hashes."""
        return self.folder / f"{self.name}.sha256"


def entry_of(function: Callable[..., Any]) -> CacheEntry:
    """Return the entry of a function; raises RuntimeError if no cache folder can be written."""
    cache = FunctionCache(function)
    return CacheEntry(Path(cache.cache_path), cache._impl.filename_base)


def make_sound(entry: CacheEntry) -> bool:
    """Remove an entry that is damaged; return whether numba may read and write it."""
    if entry.folder.exists() and not is_own(entry.folder):
        return False
    if not entry.files or _is_sound(entry):
        return True
    for path in (entry.hashes, *entry.files):
        path.unlink(missing_ok=True)
    return True


def seal(entry: CacheEntry) -> None:
    """Write the hashes of an entry, as a whole."""
    part = entry.folder / f".{secrets.token_hex(8)}.sha256"
    try:
        part.write_text(json.dumps(_hashes(entry)))
        part.replace(entry.hashes)
    finally:
        part.unlink(missing_ok=True)


def _is_sound(entry: CacheEntry) -> bool:
    try:
        written = json.loads(entry.hashes.read_text())
        return written == _hashes(entry) and all(is_own(path) for path in (entry.hashes, *entry.files))
    except (OSError, ValueError):
        return False


def _hashes(entry: CacheEntry) -> dict[str, str]:
    return {**{path.name: _hash(path) for path in entry.files}, "sources": sources_hash()}


@cache
def sources_hash() -> str:
    """Return the sha256 of the sources of all kernels."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
