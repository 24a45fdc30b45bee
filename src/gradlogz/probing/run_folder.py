"""The folder of a run: what was measured, on what, and what was found.

    run.json                 version, facts of the model and of the text, seed, command, counts, times, checksums
    statistics.safetensors   the sufficient statistics, which merge with those of other runs
    findings.json            rows, claims and tokens
    findings.parquet         the rows again, where polars is installed

A folder is written whole or not at all: beside its place, flushed to the disk, then renamed. A process that is killed
leaves the old run or the new one; if it dies between two renames, the next that reads or writes completes them.

Read next: findings.py, statistics/storage.py (states as tensors).
"""

import glob
import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from .._errors import InputValueError, sentence
from .findings import Claim, Finding, Findings, Token
from .statistics import from_tensors, to_tensors

FORMAT = 1
RUN, STATISTICS, FINDINGS, PARQUET = "run.json", "statistics.safetensors", "findings.json", "findings.parquet"


class Run(NamedTuple):
    """What a run folder holds.

    The dictionaries are plain, as JSON knows them. `statistics` is a state of statistics/storage.py, without those of
    the predictions named in `left_out`; `findings` is None and `complete` false where a run was stopped before its end.
    """

    model: dict[str, Any]
    text: dict[str, Any]
    seed: int
    command: str
    counts: dict[str, int]
    times: dict[str, float]
    statistics: Any
    findings: Findings | None
    complete: bool = True
    left_out: tuple[str, ...] = ()
    version: str = __version__


def write_run(folder: str | os.PathLike[str], run: Run) -> Path:
    """Write a run, in place of the one that the folder may hold; other files in it are kept.

    Law: tests/faults/test_a_run_is_written_whole_or_not_at_all.py.
    """
    place = check_place(folder)
    part = _part(place)
    try:
        part.mkdir()
        _write_files(part, run)
        with _alone(place):
            _keep_others(place, part)
            _flush(part)
            _swap(part, place)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        fact, remedy = f"{type(error).__name__}: {error.strerror}", "Nothing was changed; name another folder."
        raise InputValueError(sentence("write_run", f"{place} must be writable", fact, remedy)) from None
    return place


def check_place(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder in which a run can be written: new, empty or a run; refused before anything is computed."""
    place = Path(folder).expanduser().absolute()
    if place.exists() and not place.is_dir():
        raise InputValueError(sentence("write_run", "folder must be a folder", f"the file {place}", "Name another."))
    if place.is_dir() and any(place.iterdir()) and not _is_run(place):
        fact, remedy = f"{place} with other files", "Name a folder that is new, empty or a run."
        raise InputValueError(sentence("write_run", "folder must hold a run or nothing", fact, remedy))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_part(place), ignore_errors=True)
        _part(place).mkdir()
        _part(place).rmdir()
    except OSError as error:
        fact, remedy = f"{type(error).__name__} in {place.parent}", "Name another folder."
        raise InputValueError(
            sentence("write_run", "folder must be in one that can be written to", fact, remedy)
        ) from None
    return place


def read_run(folder: str | os.PathLike[str], *, allow_incomplete: bool = False) -> Run:
    """Read a run back, after checking that every file is as it was written.

    A run that was stopped before its end is refused unless allow_incomplete: its numbers are of a part of the text.
    """
    place = Path(folder).expanduser().absolute()
    with _alone(place):
        return _read(place, allow_incomplete)


def as_json(findings: Findings) -> str:
    """Findings as JSON; NaN is null there, and infinities are words, which JSON has no numbers for."""
    kinds = ("rows", "claims", "tokens")
    said = {kind: [{n: _plain(v) for n, v in e._asdict().items()} for e in getattr(findings, kind)] for kind in kinds}
    return json.dumps({"facts": {**findings.facts}, **said}, indent=1, allow_nan=False)


def write_findings(path: str | os.PathLike[str], findings: Findings) -> None:
    """Findings as one file of JSON."""
    Path(path).write_text(as_json(findings) + "\n", encoding="utf-8")


def read_findings(path: str | os.PathLike[str]) -> Findings:
    """The findings that write_findings wrote."""
    said = _json(Path(path))
    kinds: dict[str, Any] = {"rows": Finding, "claims": Claim, "tokens": Token}
    parts = {name: [_entry(kind, entry) for entry in said[name]] for name, kind in kinds.items()}
    return Findings(said["facts"], **parts)


# Writing ------------------------------------------------------------------------------------------------------------


def _write_files(folder: Path, run: Run) -> None:
    """All files of a run; run.json comes last, with the checksums of the others."""
    from safetensors.torch import save_file

    tensors, layout = to_tensors(run.statistics)
    save_file(tensors, folder / STATISTICS, metadata={"layout": json.dumps(layout)})
    (folder / RUN).touch()
    shutil.copymode(folder / RUN, folder / STATISTICS)  # safetensors would keep it to the user alone
    if run.findings is not None:
        write_findings(folder / FINDINGS, run.findings)
        if find_spec("polars") is not None:
            run.findings.frame().write_parquet(folder / PARQUET)
    others = sorted(path for path in folder.iterdir() if path.name != RUN)
    files = {path.name: {"bytes": path.stat().st_size, "blake2b": _checksum(path)} for path in others}
    plain = {name: value for name, value in run._asdict().items() if name not in ("statistics", "findings")}
    said = {"format": FORMAT, **plain, "files": files}
    (folder / RUN).write_text(json.dumps(said, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    """Every file and every folder below this one is on the disk before anything is renamed."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _part(place: Path) -> Path:
    """Where this process writes; by its name others see whether it still runs."""
    return place.with_name(f".{place.name}.part-{socket.gethostname()}-{os.getpid()}")


def _aside(place: Path, mark: str) -> Path:
    return place.with_name(f".{place.name}.{mark}")


def _swap(part: Path, place: Path) -> None:
    """Put a written folder in its place: new is complete before old goes, and old goes before new comes."""
    new, old = _aside(place, "new"), _aside(place, "old")
    part.rename(new)
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """No other process is between two renames at this place meanwhile; what a killed one left there is completed."""
    handle = None
    with suppress(ImportError, OSError):  # where folders cannot be locked, nothing but luck keeps two writers apart
        import fcntl

        handle = os.open(place.parent, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        _settle(place)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _settle(place: Path) -> None:
    """Between two renames the new folder is whole: it comes if the old one has gone, and goes if that is there."""
    new, old = _aside(place, "new"), _aside(place, "old")
    if not place.exists():
        for folder in (new, old):
            if folder.is_dir() and not place.exists():
                folder.rename(place)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    for part in place.parent.glob(f".{glob.escape(place.name)}.part-{socket.gethostname()}-*"):
        if not _runs(int(part.name.rpartition("-")[2])):
            shutil.rmtree(part, ignore_errors=True)


def _keep_others(place: Path, part: Path) -> None:
    """Files that someone else put into the folder of the run stay there."""
    for other in place.iterdir() if place.exists() else ():
        if other.name not in (RUN, STATISTICS, FINDINGS, PARQUET):
            copy = shutil.copytree if other.is_dir() else shutil.copy2
            copy(other, part / other.name)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, and is another user's
        return True
    return True


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# Reading ------------------------------------------------------------------------------------------------------------


def _read(place: Path, allow_incomplete: bool) -> Run:
    if not (place / RUN).is_file():
        fact, remedy = f"{place}", "gradlogz probe MODEL --out FOLDER writes one."
        raise InputValueError(sentence("read_run", f"folder must be a run, with {RUN} in it", fact, remedy))
    said = _json(place / RUN)
    number = said.get("format")
    if not isinstance(number, int) or number > FORMAT:
        remedy = f"It was written by gradlogz {said.get('version')}; install that or a later one."
        raise InputValueError(
            sentence("read_run", f"the format must be {FORMAT} or less", f"{number!r} in {RUN}", remedy)
        )
    for name, expected in said["files"].items():
        _check_file(place / name, expected)
    if not said["complete"] and not allow_incomplete:
        fact = f"one that stopped after {said['counts'].get('tokens', 'some')} tokens in {place.name}"
        remedy = "Run the command again, or pass allow_incomplete=True."
        raise InputValueError(sentence("read_run", "a run must be complete", fact, remedy))
    names = ("model", "text", "seed", "command", "counts", "times", "complete", "version")
    kept = {**{name: said[name] for name in names}, "left_out": tuple(said.get("left_out", ()))}
    findings = read_findings(place / FINDINGS) if FINDINGS in said["files"] else None
    return Run(statistics=_read_statistics(place / STATISTICS), findings=findings, **kept)


def _is_run(folder: Path) -> bool:
    """Whether the folder holds a run, of any format, whole or damaged."""
    try:
        said = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return (folder / STATISTICS).is_file()
    return isinstance(said, dict) and "format" in said


def _json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = type(error).__name__
    if not isinstance(said, dict):
        fact = said if isinstance(said, str) else type(said).__name__
        remedy = "It was damaged or written by something else; make the run again."
        raise InputValueError(sentence("read_run", f"{path.name} must be an object in JSON", fact, remedy))
    return said


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    remedy = "The run was damaged; copy it again, or make it again."
    size = path.stat().st_size if path.is_file() else None
    if size != expected["bytes"]:
        fact = "no such file" if size is None else f"{size} bytes of {expected['bytes']}"
        raise InputValueError(sentence("read_run", f"{path.name} must be as it was written", fact, remedy))
    if _checksum(path) != expected["blake2b"]:
        raise InputValueError(sentence("read_run", f"{path.name} must be as it was written", "other bytes", remedy))


def _read_statistics(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        layout = json.loads(file.metadata()["layout"])
        return from_tensors({name: file.get_tensor(name) for name in file.keys()}, layout)  # noqa: SIM118


def _plain(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "infinity" if value > 0 else "-infinity"


def _entry(kind: Any, said: dict[str, Any]) -> Any:
    """The row, claim or token of its dictionary, numbers as they were."""
    numbers = {name for name, annotation in kind.__annotations__.items() if annotation is float}
    return kind(**{n: (math.nan if v is None else float(v)) if n in numbers else v for n, v in said.items()})
