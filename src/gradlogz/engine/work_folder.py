"""Folder of a piece of work: what it is, the states of its finished items, and what happened.

    work.json                       facts that must be equal for the work to continue: settings, inputs, version
    inputs/ID-CHECKSUM.safetensors  what items read, if it is not part of the call; the checksum is in the name
    items/ID-CHECKSUM.safetensors   state of an item
    joined/ID-CHECKSUM.safetensors  states of several items, merged, if they are large
    events.jsonl                    one line for each start, finished item, failed item and end

A state is written to a temporary file, flushed and renamed: a killed process leaves a state whole or not at all. A file
whose checksum differs is ignored, and its item is computed again.

Read next: state_file.py (the format of a state), work_loop.py.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from .._input_errors import InputRuntimeError, InputValueError
from .._output_files import runs, write
from .._paths import is_plain_file
from .state_file import FORMAT, Encoded, Modules, NotStorableError, read_state

LOGGER = logging.getLogger(__name__)
WORK, EVENTS, LOCK = "work.json", "events.jsonl", ".lock"
INPUTS, ITEMS, JOINED = FOLDERS = ("inputs", "items", "joined")
DAY = 86_400  # seconds after which the hidden file of a process of another machine is taken for abandoned
SUFFIX = ".safetensors"
ID = re.compile(r"[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]{0,99}")
PART = re.compile(rf"\.{ID.pattern}\..+\.(?P<process>[0-9]+)")  # a state that is being written


class WorkFolder:
    """A folder of work with these facts; created if it does not exist.

    Args:
        call: function or command in errors.
        facts: JSON values; a folder with other facts is refused, and the error names the difference.
        restart: remove the work that is in the folder.
    """

    def __init__(self, call: str, path: Path, facts: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path, self._call = path.expanduser().absolute(), call
        self._facts = json.loads(json.dumps(dict(facts)))  # as they are read back: tuples are lists
        self._restart = restart

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, checked and locked: a second process that opens it raises an error."""
        self._check_place()
        with ExitStack() as stack:
            try:
                stack.enter_context(self._locked())
                self._check_facts()
                for folder in FOLDERS:
                    (self.path / folder).mkdir(exist_ok=True)
            except OSError as error:
                problem = f"the folder {self.path} cannot be written ({error.strerror})"
                raise InputValueError(self._call, "folder", problem, "Name another folder.") from None
            _remove_abandoned(self.path)  # by an earlier command
            try:
                yield
            finally:
                _remove_abandoned(self.path)  # by workers of this one

    def write(self, name: str, state: Any, folder: str = ITEMS) -> Path:
        """Write the state of an item; unlike other files (_output_files.py) its name depends on what is written."""
        part = self.path / folder / f".{name}.{socket.gethostname()}.{os.getpid()}"
        try:
            Encoded(state).write(part, {"item": name})
            with part.open("rb") as file:
                checksum = hashlib.file_digest(file, _hash).hexdigest()
                os.fsync(file.fileno())
            return part.replace(part.with_name(f"{name}-{checksum}{SUFFIX}"))
        finally:
            part.unlink(missing_ok=True)

    def finished(self, folder: str = ITEMS) -> dict[str, Path]:
        """Files of the finished items, by id; damaged ones are not among them."""
        files = sorted((self.path / folder).glob(f"[!.]*{SUFFIX}"))
        undamaged = [f for f in files if is_plain_file(f) and f.stem.rpartition("-")[2] == _checksum(f)]
        for file in sorted({*files} - {*undamaged}):
            LOGGER.warning("%s was cut or changed, and is ignored", file)
        return {file.stem.rpartition("-")[0]: file for file in undamaged}

    def read(self, name: str, path: Path, modules: Modules | None = None) -> Any:
        """Read the state of an item."""
        try:
            return read_state(path, modules, facts={"item": name})
        except NotStorableError:
            remedy = "Delete it and run the command again."
            raise InputRuntimeError(self._call, None, f"the file {path} is not the state of {name}", remedy) from None

    def log(self, event: str, **facts: Any) -> None:
        """Append a line to the events; on a full disk the lines end, not the work."""
        with suppress(OSError), (self.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n")

    def _check_place(self) -> None:
        if self.path.is_dir() and not (self.path / WORK).is_file() and any(self._others()):
            problem = f"the folder {self.path} has other files and no work of gradlogz"
            raise InputValueError(self._call, "folder", problem, "Name a folder that is new or empty.")
        if strange := self._strange():
            problem = f"{strange[0]} in the folder {self.path} is a link, or no file of gradlogz"
            raise InputValueError(self._call, "folder", problem, "Name another folder.")
        if self.path.exists() and not self.path.is_dir():
            raise InputValueError(self._call, "folder", f"{self.path} is a file, not a folder", "Name another folder.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder {self.path} cannot be created ({error.strerror})"
            raise InputValueError(self._call, "folder", problem, "Name another folder.") from None

    def _strange(self) -> list[str]:
        """Names of this folder that are links, or of another kind: nothing outside of the folder is read or written."""
        kinds = {**dict.fromkeys(FOLDERS, stat.S_ISDIR), **dict.fromkeys((WORK, EVENTS, LOCK), stat.S_ISREG)}
        there = {name for name in kinds if os.path.lexists(self.path / name)}
        return [name for name in sorted(there) if not kinds[name]((self.path / name).lstat().st_mode)]

    def _others(self) -> Iterator[Path]:
        """Files that are not of the beginning of a piece of work, which a kill may have left without its facts."""
        names = (*FOLDERS, LOCK)
        return (p for p in self.path.iterdir() if p.name not in names and not p.name.startswith(f".{WORK}."))

    def _check_facts(self) -> None:
        """Write the facts of new work; compare those of work that continues."""
        file = self.path / WORK
        if self._restart:
            for folder in FOLDERS:
                shutil.rmtree(self.path / folder, ignore_errors=True)
            file.unlink(missing_ok=True)
            (self.path / EVENTS).unlink(missing_ok=True)
        if file.is_file():
            self._compare(_read(file))
            return
        write(file, json.dumps({"format": FORMAT, "facts": self._facts}, indent=1) + "\n")

    def _compare(self, before: Mapping[str, Any] | None) -> None:
        remedy = "Name another folder, or begin again with restart (--restart)."
        if before is None:
            problem = f"{WORK} in the folder {self.path} is damaged, so that its work is unknown"
            raise InputValueError(self._call, "folder", problem, remedy)
        names = sorted(before.keys() | self._facts.keys())
        changes = [
            f"{name} was {_text(before, name)} and is {_text(self._facts, name)}"
            for name in names
            if before.get(name) != self._facts.get(name)
        ]
        if changes:
            problem = f"the folder {self.path} has other work: {'; '.join(changes)}"
            raise InputValueError(self._call, "folder", problem, remedy)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            with suppress(ImportError):  # systems without fcntl do not protect two processes from each other
                import fcntl

                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    problem = f"another process works in the folder {self.path}"
                    remedy = "Wait for its end, or name another folder."
                    raise InputRuntimeError(self._call, "folder", problem, remedy) from None
            yield
        finally:
            os.close(handle)


def check_ids(call: str, names: Mapping[str, Any]) -> None:
    """Raise unless every id can be the name of a file."""
    for name in names:
        if not ID.fullmatch(name):
            problem = f"the id {name!r} cannot be the name of a file"
            raise InputValueError(
                call, "items", problem, "Use letters, digits and _ . = + -, without a dot at the beginning."
            )


def _remove_abandoned(path: Path) -> None:
    """Remove the hidden files of killed workers; a process of another machine shows by the age of its file."""
    for part in (part for folder in FOLDERS for part in (path / folder).glob(".*")):
        name = PART.fullmatch(part.name)
        if name is None or not is_plain_file(part):
            continue
        here = part.name.endswith(f".{socket.gethostname()}.{name['process']}")
        with suppress(OSError):  # its process may end at this moment
            if not runs(int(name["process"])) if here else time.time() - part.stat().st_mtime > DAY:
                part.unlink()
                LOGGER.debug("%s of a process that was killed is removed", part)


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _hash).hexdigest()


def _read(file: Path) -> Mapping[str, Any] | None:
    """Facts of a folder; None if the file is damaged."""
    with suppress(ValueError, OSError, RecursionError):
        described = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(described, dict) and isinstance(described.get("facts"), dict):
            return (
                dict(described["facts"]) if described.get("format") == FORMAT else {"format": described.get("format")}
            )
    return None


def _text(facts: Mapping[str, Any], name: str) -> str:
    return json.dumps(facts[name]) if name in facts else "not given"
