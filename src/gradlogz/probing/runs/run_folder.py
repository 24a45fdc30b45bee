"""The folder of a run: what was measured, on what, and what was found.

    run.json            version, facts of the model and of the text, seed, command, counts, times, checksums
    findings.json       rows, claims, tokens and declarations: findings_file.py
    findings.parquet    the rows again, where polars is installed

A folder is written whole or not at all: beside its place, flushed to the disk, then renamed. A process that is killed
leaves the old run or the new one; if it dies between two renames, the next that reads or writes completes them.

Read next: findings.py, findings_file.py (one file of it), ../../reporting/run_contents.py (who reads leniently).
"""

import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ..._errors import InputValueError
from .findings import Findings
from .findings_file import FINDINGS, Problems, findings_in, object_in, write_findings

FORMAT = 2  # 1 had no declarations, and a file of statistics
RUN, PARQUET, STATISTICS = "run.json", "findings.parquet", "statistics.safetensors"


class Run(NamedTuple):
    """What a run folder holds.

    The dictionaries are plain, as JSON knows them; `complete` is false where a run was stopped before its end. `notes`
    are those of a lenient reader on what is missing; what it does not know of a run is empty, the seed None.
    """

    model: dict[str, Any]
    text: dict[str, Any]
    seed: int | None
    command: str
    counts: dict[str, int]
    times: dict[str, float]
    findings: Findings
    complete: bool = True
    version: str = __version__
    notes: tuple[str, ...] = ()


DESCRIBED = {
    "model": dict, "text": dict, "seed": int, "command": str, "counts": dict, "times": dict, "complete": bool,
    "version": str,
}  # fmt: skip


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
        raise InputValueError("write_run", "folder", f"{place} must be writable, got {fact}", remedy) from None
    return place


def check_place(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder in which a run can be written: new, empty or a run; refused before anything is computed."""
    place = Path(folder).expanduser().absolute()
    if place.exists() and not place.is_dir():
        raise InputValueError("write_run", "folder", f"folder must be a folder, got the file {place}", "Name another.")
    if place.is_dir() and any(place.iterdir()) and not _is_run(place):
        fact, remedy = f"{place} with other files", "Name a folder that is new, empty or a run."
        raise InputValueError("write_run", "folder", f"folder must hold a run or nothing, got {fact}", remedy)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_part(place), ignore_errors=True)
        _part(place).mkdir()
        _part(place).rmdir()
    except OSError as error:
        fact, remedy = f"{type(error).__name__} in {place.parent}", "Name another folder."
        raise InputValueError(
            "write_run", "folder", f"folder must be in one that can be written to, got {fact}", remedy
        ) from None
    return place


def read_run(folder: str | os.PathLike[str], *, strict: bool = True, call: str = "read_run") -> Run:
    """Read a run back, after checking that it is complete and that every file is as it was written.

    strict: refuse a run that is not. Else read what can be read, with `notes` about what is missing or doubtful; only
        a folder without readable findings is refused. call: the name of the caller in errors.
    """
    place = Path(folder).expanduser().absolute()
    with _alone(place):
        return _read(place, Problems(call, strict=strict))


# Writing ------------------------------------------------------------------------------------------------------------


def _write_files(folder: Path, run: Run) -> None:
    """All files of a run; run.json comes last, with the checksums of the others."""
    write_findings(folder / FINDINGS, run.findings)
    if find_spec("polars") is not None:
        run.findings.frame().write_parquet(folder / PARQUET)
    others = sorted(path for path in folder.iterdir() if path.name != RUN)
    files = {path.name: {"bytes": path.stat().st_size, "blake2b": _checksum(path)} for path in others}
    content = {"format": FORMAT, **{name: getattr(run, name) for name in DESCRIBED}, "files": files}
    (folder / RUN).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


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
        if other.name not in (RUN, FINDINGS, PARQUET, STATISTICS):
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


def _read(place: Path, problems: Problems) -> Run:
    if not any((place / name).is_file() for name in (RUN, FINDINGS, PARQUET)):
        fact = f"{place}, " + ("which holds neither" if place.is_dir() else "which is no folder")
        remedy = "gradlogz probe MODEL --out FOLDER writes one."
        problems.refuse(f"a run must be a folder with {RUN} and {FINDINGS}", fact, remedy)
    described = _description(place, problems)
    findings = _findings(place, described["model"], problems)
    return Run(**described, findings=findings, notes=tuple(problems.notes))


def _description(place: Path, problems: Problems) -> dict[str, Any]:
    """What run.json says, empty where it says nothing of the right type."""
    content = object_in(place / RUN)
    if isinstance(content, str):
        note = f"{RUN} cannot be read ({content}): seed, text and command line are not known."
        problems.meet(note, f"{RUN} must be readable", content)
        content = {}
    else:
        _check_description(content, place, problems)
    known = {name: content[name] for name, kind in DESCRIBED.items() if isinstance(content.get(name), kind)}
    return {name: None if kind is int else kind() for name, kind in DESCRIBED.items()} | known


def _check_description(content: Mapping[str, Any], place: Path, problems: Problems) -> None:
    number, version = content.get("format"), content.get("version")
    if not isinstance(number, int) or number > FORMAT:
        note = (
            f"The run is of format {number}, written by gradlogz {version}; this is what format {FORMAT} has in common "
            "with it."
        )
        remedy = f"It was written by gradlogz {version}; install that or a later one."
        problems.meet(note, f"the format must be {FORMAT} or less", f"{number!r} in {RUN}", remedy)
    elif number < FORMAT and not problems.strict:
        problems.notes.append(
            f"The run is of format {number}, written by gradlogz {version}, without declarations: names stand in place "
            "of titles, and units, formulas and methods are not known."
        )
    lacking = [name for name, kind in DESCRIBED.items() if not isinstance(content.get(name), kind)]
    if lacking and problems.strict:
        problems.refuse(f"{RUN} must be whole", f"one without {', '.join(lacking)}")
    if not content.get("complete", False):
        counts = content.get("counts")
        tokens = counts.get("tokens", "some") if isinstance(counts, dict) else "some"
        note = f"The run stopped before its end, after {tokens} tokens; the numbers are of that part."
        fact = f"one that stopped after {tokens} tokens in {place.name}"
        problems.meet(note, "a run must be complete", fact, "Run the command again, or pass strict=False.")
    files = content.get("files")
    for name, written in files.items() if isinstance(files, dict) else ():
        _check_file(place / str(name), written, problems)


def _check_file(path: Path, written: Any, problems: Problems) -> None:
    """The file is as it was written; a lenient reader says elsewhere what it lacks without one that is gone."""
    fact = _difference(path, written) if isinstance(written, dict) else ""
    if fact and (problems.strict or path.is_file()):
        whatever = "its numbers may have been changed" if path.name == FINDINGS else "nothing that is shown needs it"
        remedy = "The run was damaged; copy it again, or make it again."
        note = f"{path.name} is not as it was written; {whatever}."
        problems.meet(note, f"{path.name} must be as it was written", fact, remedy)


def _difference(path: Path, written: Mapping[str, Any]) -> str:
    size = path.stat().st_size if path.is_file() else None
    if size != written.get("bytes"):
        return "no such file" if size is None else f"{size} bytes of {written.get('bytes')}"
    return "" if _checksum(path) == written.get("blake2b") else "other bytes"


def _findings(place: Path, model: Mapping[str, Any], problems: Problems) -> Findings:
    content = object_in(place / FINDINGS)
    if isinstance(content, str) and not problems.strict and (rows := _rows(place / PARQUET)):
        problems.notes.append(
            f"{FINDINGS} cannot be read ({content}): rows are those of {PARQUET}. The verdicts on whole claims are "
            "lost; here a claim is undecided where its heads or layers differ."
        )
        content = {"facts": {model.get("name"): model}, "rows": rows, "claims": [], "tokens": []}
    if isinstance(content, str):
        problems.refuse(f"{FINDINGS} must be readable", content)
    return findings_in(content, problems, str(model.get("name", place.name)))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, which findings.json has too; none where it is gone, damaged or cannot be read here."""
    if not path.is_file() or find_spec("polars") is None:
        return []
    import polars

    try:
        return polars.read_parquet(path).to_dicts()
    except (OSError, ValueError, polars.exceptions.PolarsError):
        return []


def _is_run(folder: Path) -> bool:
    """Whether the folder holds a run, of any format, whole or damaged."""
    description, findings = object_in(folder / RUN), object_in(folder / FINDINGS)
    if not isinstance(description, str):
        return "format" in description
    return "rows" in findings if isinstance(findings, dict) else (folder / STATISTICS).is_file()
