"""Run folder: description, findings and a table of rows.

    run.json            version, facts of model and text, seed, command, counts, times, checksums
    findings.json       rows, claims, tokens and declarations: findings_file.py
    findings.parquet    the rows as a table, if polars is installed
    replicates.safetensors    replicates of the rows, for differences of runs: replicates.py
    statistics.safetensors    a measurement that is not judged yet, or is kept for a merge: ../measurement_file.py

Writing is atomic: a temporary folder beside the target is flushed to the disk, then renamed. A killed process leaves
the old run or the new one; if it is killed between two renames, the next reader or writer completes them.

Read next: findings.py, findings_file.py (the JSON file), ../../reporting/run_contents.py (the lenient reader).
"""

import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ..._errors import InputValueError
from ..._output_files import reason_of, runs
from ..._parquet import read_parquet, write_parquet
from ..._paths import is_plain_file
from .findings import Findings
from .findings_file import FINDINGS, Problems, findings_in, object_in, renamed, write_findings
from .replicates import REPLICATES, read_replicates, write_replicates
from .row_table import METADATA

FORMAT = 3  # 1 had no declarations, and a file of statistics; 1 and 2 had sentences in place of details
RUN, PARQUET, STATISTICS = "run.json", "findings.parquet", "statistics.safetensors"
INTERVENTIONS: tuple[str, str] = ("interventions.json", "interventions.csv")  # those of a replaced run are not kept


class Run(NamedTuple):
    """Contents of a run folder.

    complete: false if the run was stopped before its end. notes: remarks of the lenient reader on missing parts; fields
    that it cannot read are empty, the seed None. Dictionaries hold plain JSON values.
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


def write_run(folder: str | os.PathLike[str], run: Run, *, keep_statistics: bool = False) -> Path:
    """Write a run and replace an older one in the folder; other files in it are kept.

    keep_statistics: whether the measurement in the folder is that of this run, and stays.

    Law: tests/faults/test_a_run_is_written_whole_or_not_at_all.py.
    """
    place = check_place(folder)
    part = _part(place)
    try:
        part.mkdir()
        if keep_statistics:
            _link(place / STATISTICS, part / STATISTICS)
        _write_files(part, run)
        with _alone(place):
            _keep_others(place, part)
            _flush(part)
            _swap(part, place)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if not (reason := reason_of(error)):
            raise
        problem = f"the folder {place} is not writable ({reason})"
        raise InputValueError("write_run", "folder", problem, "Nothing was changed; name another folder.") from None
    return place


def check_place(folder: str | os.PathLike[str]) -> Path:
    """Path of a folder for a run, without symbolic links; raises before any computation if a run cannot be written.

    The folder must be new, empty or a run. It is replaced as a whole, so that it can be neither the working directory,
    a folder above it, nor a mount point. A symbolic link stays, and the folder that it names is replaced.
    """
    another = "Name another folder."
    try:
        place = Path(os.path.realpath(Path(folder).expanduser()))
        if place.exists() and not place.is_dir():
            raise InputValueError("write_run", "folder", f"{place} is a file, not a folder", another)
        if place.is_dir():
            _check_replaceable(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_part(place), ignore_errors=True)
        _part(place).mkdir()
        _part(place).rmdir()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        if isinstance(error, InputValueError):
            raise
        problem = f"a folder {str(folder)[:80]!r} cannot be written ({reason_of(error) or type(error).__name__})"
        raise InputValueError("write_run", "folder", problem, another) from None
    return place


def _check_replaceable(place: Path) -> None:
    """Raise unless an existing folder is empty or a run, and can be replaced with what else is in it."""
    if any(place.iterdir()) and not _is_run(place):
        problem = f"the folder {place} has other files and no run"
        raise InputValueError("write_run", "folder", problem, "Name a folder that is new, empty or a run.")
    if place in (Path.cwd(), *Path.cwd().parents) or place.is_mount():
        kind = "a mount point" if place.is_mount() else "the working directory, or above it"
        problem = f"the folder {place} cannot be replaced by a run: it is {kind}"
        raise InputValueError("write_run", "folder", problem, "Name a folder in it.")
    special = [e.name for e in place.rglob("*") if not (e.is_symlink() or e.is_file() or e.is_dir())]
    if special:
        problem = f"the run {place} contains {special[0]}, which is no file, folder or link"
        raise InputValueError("write_run", "folder", problem, "Move it elsewhere, or name another folder.")


def read_run(
    folder: str | os.PathLike[str], *, strict: bool = True, call: str = "read_run", statistics: bool = False
) -> Run:
    """Read a run, after a check that it is complete and that every file has its checksum.

    strict: raise for a damaged or incomplete run. Otherwise read the readable part, with `notes` on the rest, and raise
        only without readable findings.
    call: name of the caller in errors.
    statistics: check those that the run keeps, too. Another probe replaces them before its run replaces this one.
    """
    place = Path(os.path.realpath(Path(folder).expanduser()))
    with _alone(place):
        return _read(place, Problems(call, strict=strict), () if statistics else (STATISTICS,))


# Writing ------------------------------------------------------------------------------------------------------------


def _write_files(folder: Path, run: Run) -> None:
    """Write all files of a run; run.json comes last, with the checksums of the others."""
    write_findings(folder / FINDINGS, run.findings)
    write_replicates(folder / REPLICATES, run.findings.rows, run.findings.replicates)
    if find_spec("polars") is not None:
        write_parquet(run.findings.frame(), folder / PARQUET, metadata=METADATA)
    others = sorted(path for path in folder.iterdir() if path.name != RUN)
    files = {path.name: {"bytes": path.stat().st_size, "blake2b": _checksum(path)} for path in others}
    content = {"format": FORMAT, **{name: getattr(run, name) for name in DESCRIBED}, "files": files}
    (folder / RUN).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; on file systems without hard links, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _flush(folder: Path) -> None:
    """Flush every file and folder below this one to the disk."""
    for path in (*(path for path in folder.rglob("*") if not path.is_symlink()), folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _part(place: Path) -> Path:
    """Temporary folder of this process; its name shows other processes whether it still runs."""
    return place.with_name(f".{place.name}.part-{socket.gethostname()}-{os.getpid()}")


def _aside(place: Path, mark: str) -> Path:
    return place.with_name(f".{place.name}.gradlogz-{mark}")


def _swap(part: Path, place: Path) -> None:
    """Move a written folder to its place: the new one is complete before the old one is removed."""
    new, old = _aside(place, "new"), _aside(place, "old")
    part.rename(new)
    if place.exists():
        place.rename(old)
    new.rename(place)
    _remove(old)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Exclusive lock on the renames at this place; interrupted renames of killed processes are completed."""
    handle = None
    with suppress(ImportError, OSError):  # file systems without locks do not protect concurrent writers
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
    """Complete interrupted renames: the new folder takes the place if the old one is gone, else it is removed."""
    if not place.name:  # the root of the file system, which is no run
        return
    new, old = _aside(place, "new"), _aside(place, "old")
    if not place.exists():
        for folder in (new, old):
            if folder.is_dir() and not place.exists():
                folder.rename(place)
    for folder in (new, old):
        _remove(folder)
    for part in place.parent.glob(f".{glob.escape(place.name)}.part-{glob.escape(socket.gethostname())}-*"):
        number = part.name.rpartition("-")[2]
        if number.isdecimal() and not runs(int(number)):
            shutil.rmtree(part, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a folder that was set aside; one with neither a run nor nothing in it is of someone else."""
    if folder.is_dir() and not folder.is_symlink() and (_is_run(folder) or not any(folder.iterdir())):
        shutil.rmtree(folder, ignore_errors=True)


def _keep_others(place: Path, part: Path) -> None:
    """Copy the files of other origin in the run folder, and links as links."""
    for other in place.iterdir() if place.exists() else ():
        if other.name in (RUN, FINDINGS, PARQUET, REPLICATES, STATISTICS, *INTERVENTIONS):
            continue
        if other.name.startswith(f".{STATISTICS}."):  # of a killed process that wrote it
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.copytree(other, part / other.name, symlinks=True)
        else:
            shutil.copy2(other, part / other.name, follow_symlinks=False)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# Reading ------------------------------------------------------------------------------------------------------------


def _read(place: Path, problems: Problems, unchecked: Sequence[str]) -> Run:
    if not any((place / name).is_file() for name in (RUN, FINDINGS, PARQUET)):
        problem = f"{place} has neither {RUN} nor {FINDINGS}" if place.is_dir() else f"there is no run folder {place}"
        problems.refuse(
            problem, f"Name a folder with {RUN} and {FINDINGS}; gradlogz probe MODEL --out FOLDER writes one."
        )
    described = _description(place, problems, unchecked)
    findings = _findings(place, described["model"], problems)
    return Run(**described, findings=findings, notes=tuple(problems.notes))


def _description(place: Path, problems: Problems, unchecked: Sequence[str]) -> dict[str, Any]:
    """Contents of run.json; fields that are missing or of another type are empty."""
    content = object_in(place / RUN)
    if isinstance(content, str):
        note = f"{RUN} cannot be read ({content}): seed, text and command line are unknown."
        problems.meet(note, f"{RUN} is not readable ({content})")
        content = {}
    else:
        _check_description(content, place, problems, unchecked)
    known = {name: content[name] for name, kind in DESCRIBED.items() if isinstance(content.get(name), kind)}
    known |= {name: renamed(known[name]) for name in ("model", "times") if name in known}
    return {name: None if kind is int else kind() for name, kind in DESCRIBED.items()} | known


def _check_description(content: Mapping[str, Any], place: Path, problems: Problems, unchecked: Sequence[str]) -> None:
    number, version = content.get("format"), content.get("version")
    if not isinstance(number, int) or number > FORMAT:
        note = f"The run is of format {number}, written by gradlogz {version}; shown are the fields of format {FORMAT}."
        problem = f"the format in {RUN} must be at most {FORMAT}, got {number!r}"
        problems.meet(note, problem, f"Install gradlogz {version} or later, which wrote it.")
    elif number < 2 and not problems.strict:
        problems.notes.append(
            f"The run is of format {number}, written by gradlogz {version}, without declarations: names replace "
            "titles, and units, formulas and methods are unknown."
        )
    lacking = [name for name, kind in DESCRIBED.items() if not isinstance(content.get(name), kind)]
    if lacking and problems.strict:
        problems.refuse(f"{RUN} is incomplete: {', '.join(lacking)} missing or invalid")
    if not content.get("complete", False):
        counts = content.get("counts")
        tokens = counts.get("tokens", "some") if isinstance(counts, dict) else "some"
        note = f"The run stopped before its end, after {tokens} tokens; the results are of that part."
        problem = f"the run {place.name} is not complete: it stopped after {tokens} tokens"
        problems.meet(note, problem, "Run the command again, or pass strict=False.")
    files = content.get("files")
    for name, written in files.items() if isinstance(files, dict) else ():
        if Path(name).name == name and name not in unchecked:  # a run has no files elsewhere
            _check_file(place / name, written, problems)


def _check_file(path: Path, written: Any, problems: Problems) -> None:
    """Check size and checksum of a file; a lenient reader notes missing files elsewhere."""
    fact = _difference(path, written) if isinstance(written, dict) else ""
    if fact and (problems.strict or path.is_file()):
        effect = "its numbers may be wrong" if path.name == FINDINGS else "the page does not need it"
        note = f"{path.name} differs from the file that was written; {effect}."
        problem = f"{path.name} differs from the file that was written ({fact})"
        problems.meet(note, problem, "Copy the run again, or run the probe again.")


def _difference(path: Path, written: Mapping[str, Any]) -> str:
    if not is_plain_file(path):
        return "no such file"
    size = path.stat().st_size
    if size != written.get("bytes"):
        return f"{size} bytes of {written.get('bytes')}"
    return "" if _checksum(path) == written.get("blake2b") else "other bytes"


def _findings(place: Path, model: Mapping[str, Any], problems: Problems) -> Findings:
    content = object_in(place / FINDINGS)
    if isinstance(content, str) and not problems.strict and (rows := _rows(place / PARQUET)):
        problems.notes.append(
            f"{FINDINGS} cannot be read ({content}): rows are those of {PARQUET}. The verdicts on claims are "
            "lost; a claim is shown as inconclusive if the verdicts of its heads or layers differ."
        )
        content = {"facts": {model.get("name"): model}, "rows": rows, "claims": [], "tokens": []}
    if isinstance(content, str):
        problems.refuse(f"{FINDINGS} is not readable ({content})")
    findings = findings_in(content, problems, str(model.get("name", place.name)))
    replicates = read_replicates(place / REPLICATES, findings.rows)
    if isinstance(replicates, str):
        if (place / REPLICATES).is_file():  # runs of earlier versions have none
            note = f"{REPLICATES} cannot be read ({replicates}): differences from other runs are not paired."
            problems.meet(note, f"{REPLICATES} is not readable ({replicates})")
        return findings
    return replace(findings, replicates=replicates)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of findings.parquet; none if it is missing or damaged, or polars is not installed."""
    if not is_plain_file(path) or find_spec("polars") is None:
        return []
    import polars

    try:
        return read_parquet(path).to_dicts()
    except (OSError, ValueError, MemoryError, polars.exceptions.PolarsError, polars.exceptions.PanicException):
        return []


def _is_run(folder: Path) -> bool:
    """True if the folder holds a run of any format, intact or damaged."""
    description, findings = object_in(folder / RUN), object_in(folder / FINDINGS)
    if not isinstance(description, str):
        return "format" in description
    return "rows" in findings if isinstance(findings, dict) else (folder / STATISTICS).is_file()
