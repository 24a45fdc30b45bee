"""Paths as users write them."""

import os
import stat
from pathlib import Path

from ._input_errors import InputValueError


def user_path(call: str, argument: str, name: str | os.PathLike[str]) -> Path:
    """Return a path with ~ replaced by the home folder; raise if no file can have this name.

    No file has a name that is too long, has a null character, or begins with the home of an unknown user.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"{os.fspath(name)[:80]!r} is not the name of a file ({type(error).__name__})"
        raise InputValueError(call, argument, problem, "Correct the path.") from None
    return path


def is_plain_file(path: Path) -> bool:
    """True for a file that is no link, pipe or device: the only ones that are read in the folder of a stranger."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_own(path: Path) -> bool:
    """True if a file or folder is this user's, no link, and not writable by everyone."""
    status = path.lstat()
    user = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    return status.st_uid == user and not stat.S_ISLNK(status.st_mode) and not status.st_mode & stat.S_IWOTH
