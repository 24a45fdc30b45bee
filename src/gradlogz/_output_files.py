"""Files that commands write: whole or not at all, and never in place of something that is no file.

    a regular file, or none        a hidden file in the same folder, flushed to the disk, takes its place
    a symbolic link                is followed: the file that it names is replaced, the link stays
    a pipe or character device     the bytes go into it (/dev/null, /dev/stdout, /dev/fd/3, a named pipe)
    a folder, a disk, a socket     are refused

`check_file` refuses before a computation what could not be written after it, and files that gradlogz did not write.

Read next: commands/outputs.py (the options of commands), probing/runs/run_folder.py (folders, by the same rules).
"""

import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ._input_errors import InputRuntimeError, InputValueError

# A file of gradlogz has all of the bytes of one of these marks in its first or its last ENDS bytes.
MARKS = (
    (b'name="generator" content="gradlogz',),  # a page
    (b'"command": "gradlogz ',),  # JSON of simulate and track
    (b'"facts": {', b'"rows": ['),  # JSON of probe
    (b'"statements": [', b'"printed_residual"'),  # JSON of verify
    (b'"CUDA of torch": "', b'"calls": ['),  # JSON of doctor
    (b"probability_", b"nis_low", b"nis_high"),  # table of track
    (b"prediction", b"quantity", b"verdict", b"null"),  # table of probe
)
ENDS = 65536
ABANDONED = 3600  # seconds after which a hidden file of a process that no longer runs is removed


def check_file(call: str, flag: str, path: Path | str, *, force: bool = False) -> None:
    """Raise if a file cannot be written, or if it exists and was not written by gradlogz.

    force: files of others, and files without permission to write, may be replaced.
    """
    another = "Name another file."
    try:
        target = real_path(path)
        place = None if descriptor_of(target) is not None else _status(target)
    except (OSError, ValueError) as error:
        problem = f"{flag} {str(path)[:80]!r} is no usable file name ({reason_of(error)})"
        raise InputValueError(call, flag, problem, another) from None
    if place is not None and not _takes_bytes(place) and not stat.S_ISREG(place.st_mode):
        kind = "a folder" if stat.S_ISDIR(place.st_mode) else "a disk or a socket"
        raise InputValueError(call, flag, f"{flag} {path} cannot be written: it is {kind}", another)
    if descriptor_of(target) is not None or (place is not None and _takes_bytes(place)):
        return
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        exists = target.parent.is_dir()
        fact = f"{target.parent} is not writable" if exists else f"there is no folder {target.parent}"
        raise InputValueError(call, flag, f"{flag} {path} cannot be written: {fact}", another)
    if place is None or force:
        return
    if not place.st_mode & 0o222:
        problem = f"{flag} {path} is a file without permission to write"
        raise InputValueError(call, flag, problem, "Name another file, or add --force to replace it.")
    if not is_own(target):
        problem = f"{flag} {path} is a file that gradlogz did not write"
        raise InputValueError(call, flag, problem, "Name another file, or add --force to replace it.")


def write(path: Path | str, text: str) -> Path:
    """Write a text to a file: a reader sees the old text or the new one, even if this process is killed."""
    with replaced(path) as part, part.open("wb") as file:
        # A name that is not UTF-8, such as that of a file, has no bytes of its own here.
        file.write(text.encode("utf-8", "backslashreplace"))
    return Path(path)


@contextmanager
def replaced(path: Path | str) -> Iterator[Path]:
    """A hidden temporary file, which at the end takes the place of `path`, or goes into it; an error removes it."""
    try:
        target = real_path(path)
        status = None if descriptor_of(target) is not None else _status(target)
        if descriptor_of(target) is None and (status is None or stat.S_ISREG(status.st_mode)):
            with hidden(target) as part:
                yield part
                with part.open("rb+") as file:
                    os.fsync(file.fileno())
                if status is not None:  # after it was opened: the old file may be one without permission to write
                    part.chmod(stat.S_IMODE(status.st_mode))
                part.replace(target)
                _flush_folder(target.parent)
        else:
            with tempfile.TemporaryDirectory(prefix="gradlogz-") as folder:
                part = Path(folder) / "part"
                part.touch()
                yield part
                _pour(part, target)
    except Exception as error:
        if not (reason := reason_of(error)):
            raise
        remedy = "Free some space, or name another file; an older file is unchanged."
        raise InputRuntimeError("write", "path", f"{path} cannot be written ({reason})", remedy) from None


def same_file(one: Path | str, other: Path | str) -> bool:
    """True if two paths name the same regular file, which need not exist."""
    first, second = real_path(one), real_path(other)
    if first == second:
        return descriptor_of(first) is None and not (first.exists() and not first.is_file())
    return first.is_file() and second.is_file() and first.samefile(second)


def is_own(path: Path) -> bool:
    """True if a file is empty or has a mark of gradlogz."""
    try:
        with path.open("rb") as file:
            content = file.read(ENDS)
            file.seek(max(0, path.stat().st_size - ENDS))
            content += file.read(ENDS)
    except OSError:
        return False
    return not content or any(all(mark in content for mark in marks) for marks in MARKS)


def reason_of(error: Exception) -> str:
    """Reason of a failure to write, in the words of the system; empty if the error is of another kind.

    Libraries written in Rust have errors of their own, whose text ends in the number of the system's error.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "it contains a null character"
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else ""


def real_path(path: Path | str) -> Path:
    """The path without symbolic links, but for those of open files, such as /dev/stdout."""
    place = Path(os.path.abspath(path))
    for _ in range(40):  # as many links as Linux follows
        if descriptor_of(place) is not None or not place.is_symlink():
            break
        place = Path(os.path.abspath(place.parent / place.readlink()))
    return place if descriptor_of(place) is not None else Path(os.path.realpath(place))


def descriptor_of(path: Path) -> int | None:
    """Number of the open file of this process that a path such as /dev/fd/1 names; None for other paths."""
    number = re.fullmatch(rf"/(?:dev|proc/self|proc/{os.getpid()})/fd/(\d+)", str(path))
    return int(number[1]) if number else None


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _takes_bytes(status: os.stat_result) -> bool:
    return stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode)


@contextmanager
def hidden(target: Path) -> Iterator[Path]:
    """A new hidden file beside a file; no other process knows its name, and none follows a link to it."""
    stem = f".{target.name[:60]}"
    _remove_abandoned(target.parent, stem)
    part = target.with_name(f"{stem}.{os.getpid()}.{secrets.token_hex(4)}.part")
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _remove_abandoned(folder: Path, stem: str) -> None:
    """Remove the hidden files of killed processes; a process of another machine shows by the age of its file."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            name = re.fullmatch(re.escape(stem) + r"\.(\d{1,10})\.[0-9a-f]{8}\.part", entry.name)
            if name and time.time() - entry.stat().st_mtime > ABANDONED and not runs(int(name[1])):
                Path(entry.path).unlink(missing_ok=True)


def runs(process: int) -> bool:
    """True if a process of this number runs on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _pour(part: Path, target: Path) -> None:
    """Write the bytes of a file into a device, a pipe or an open file of this process."""
    sys.stdout.flush()  # what was printed before comes before
    number = descriptor_of(target)
    handle = os.open(target, os.O_WRONLY) if number is None else os.dup(number)
    with part.open("rb") as source, os.fdopen(handle, "wb") as sink:
        shutil.copyfileobj(source, sink)
