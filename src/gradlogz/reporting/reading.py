"""A run folder, as far as it can be read, and what is missing.

A page is made from what is there: findings that are whole are shown even where the rest of the run is not, and the page
says so. probing/run_folder.py is stricter, since statistics that are damaged must not be merged.

Read next: pages.py, ../probing/run_folder.py.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import InputValueError, sentence
from ..probing.findings import Findings
from ..probing.records import VERDICTS, Claim, Finding, Token
from ..probing.run_folder import FINDINGS, FORMAT, PARQUET, RUN

Source = str | os.PathLike[str] | Findings
HEADS = 4096  # more than any layer has; a map of them would fill the memory


class Told(NamedTuple):
    """What a run says of one model.

    run: what run.json says, empty where it cannot be read. missing: sentences about what is not there.
    """

    name: str
    findings: Findings
    run: Mapping[str, Any]
    missing: tuple[str, ...]
    folder: str = ""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the model."""
        return self.findings.facts[self.name]


def read(source: Source, call: str) -> Told:
    """A run folder or findings of one model; refused where there is no row and no claim."""
    findings, run, missing, folder = (source, {}, [], "") if isinstance(source, Findings) else _folder(source, call)
    models = list(findings.facts)
    if len(models) != 1 or not (findings.rows or findings.claims):
        fact = f"{len(models)} models" if len(models) != 1 else f"neither rows nor claims of {models[0]}"
        remedy = "Compare several as several." if len(models) != 1 else "Make the run again; this one measured nothing."
        raise InputValueError(sentence(call, "a page must have findings of one model", fact, remedy))
    return Told(models[0], findings, run, tuple(missing), folder)


def _folder(source: str | os.PathLike[str], call: str) -> tuple[Findings, dict[str, Any], list[str], str]:
    place = Path(source).expanduser().absolute()
    if not any((place / name).is_file() for name in (RUN, FINDINGS, PARQUET)):
        fact = f"{place}, " + ("which holds neither" if place.is_dir() else "which is no folder")
        remedy = "gradlogz probe MODEL --out FOLDER writes one."
        raise InputValueError(sentence(call, f"a run must be a folder with {RUN} and {FINDINGS}", fact, remedy))
    run, missing = _run(place)
    said = _object(place / FINDINGS)
    if isinstance(said, str) and (rows := _rows(place / PARQUET)):
        missing.append(
            f"{FINDINGS} cannot be read ({said}): rows are those of {PARQUET}. The verdicts on whole claims are lost; "
            "here a claim is undecided where its heads or layers differ."
        )
        said = {
            "facts": {run.get("model", {}).get("name"): run.get("model", {})},
            "rows": rows,
            "claims": [],
            "tokens": [],
        }
    if isinstance(said, str):
        remedy = "Make the run again; its statistics may be whole, but judging them needs the model."
        raise InputValueError(sentence(call, f"{FINDINGS} must be readable", said, remedy))
    findings, notes = _lenient(said, str(run.get("model", {}).get("name", place.name)))
    return findings, run, [*missing, *notes], place.name


def _run(place: Path) -> tuple[dict[str, Any], list[str]]:
    """What run.json says, and what it makes doubtful."""
    run = _object(place / RUN)
    if isinstance(run, str):
        return {}, [f"{RUN} cannot be read ({run}): seed, text and command line are not known."]
    missing = []
    number = run.get("format")
    if number != FORMAT:
        missing.append(
            f"The run is of format {number}, written by gradlogz {run.get('version')}; this page is made from what "
            f"format {FORMAT} has in common with it."
        )
    if not run.get("complete", False):
        counts = run.get("counts")
        tokens = counts.get("tokens", "some") if isinstance(counts, dict) else "some"
        missing.append(f"The run stopped before its end, after {tokens} tokens; the numbers are of that part.")
    files = run.get("files")
    kept = files.get(FINDINGS) if isinstance(files, dict) else None
    if isinstance(kept, dict) and (place / FINDINGS).is_file() and _checksum(place / FINDINGS) != kept.get("blake2b"):
        missing.append(f"{FINDINGS} is not as it was written; its numbers may have been changed.")
    missing += [
        f"{name} has another size than it was written with; this page does not need it."
        for name, written in (files.items() if isinstance(files, dict) else ())
        if name != FINDINGS
        and isinstance(written, dict)
        and (place / str(name)).is_file()
        and (place / str(name)).stat().st_size != written.get("bytes")
    ]
    if not isinstance(run.get("model"), dict):
        run = {**run, "model": {}}
    return run, missing


def _object(path: Path) -> dict[str, Any] | str:
    """The object of a file, or in a few words why there is none."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError, RecursionError) as error:
        return f"damaged, {type(error).__name__}"
    return said if isinstance(said, dict) else f"damaged, {type(said).__name__}"


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, which findings.json has too; none where it is gone, damaged or cannot be read here."""
    if not path.is_file() or find_spec("polars") is None:
        return []
    import polars

    try:
        return polars.read_parquet(path).to_dicts()
    except (OSError, ValueError, polars.exceptions.PolarsError):
        return []


def _lenient(said: dict[str, Any], name: str) -> tuple[Findings, list[str]]:
    """The findings without the entries that cannot be read, and a sentence for each kind of those."""
    notes = []
    kinds: dict[str, Any] = {"rows": Finding, "claims": Claim, "tokens": Token}
    parts: dict[str, list[Any]] = {}
    for kind, entry in kinds.items():
        given = said.get(kind)
        entries = [_entry(entry, each) for each in given] if isinstance(given, list) else []
        parts[kind] = [each for each in entries if each is not None]
        left = len(entries) - len(parts[kind])
        if given is None or left:
            some = f"{left} of {len(entries)} {kind} in {FINDINGS} cannot be read; they are left out."
            notes.append(f"There are no {kind} in {FINDINGS}." if given is None else some)
    facts = said.get("facts")
    known = facts if isinstance(facts, dict) and all(isinstance(each, dict) for each in facts.values()) else {}
    models = dict.fromkeys(each.model for kind in parts.values() for each in kind)
    facts = {**{model: known.get(model, {}) for model in models}} or known or {name: {}}
    once = {kind: list({_identity(each): each for each in entries}.values()) for kind, entries in parts.items()}
    return Findings(facts, **once), notes


def _identity(entry: Any) -> tuple[Any, ...]:
    if isinstance(entry, Finding):
        return entry[:6]
    return entry[:2] if isinstance(entry, Claim) else tuple(entry)


def _entry(kind: Any, said: Any) -> Any:
    """The row, claim or token of its dictionary; None if it lacks something or says what is not known."""
    if not isinstance(said, dict):
        return None
    fields: dict[str, Any] = {}
    for name, annotation in kind.__annotations__.items():
        if name in said:
            value = said[name]
            try:
                fields[name] = (math.nan if value is None else float(value)) if annotation is float else value
            except (TypeError, ValueError):
                return None
            if annotation in (str, int) and not isinstance(value, annotation):
                return None
    head = fields.get("head")
    if fields.get("verdict", "") not in ("", *VERDICTS) or isinstance(head, bool) or not isinstance(head, int | None):
        return None
    if head is not None and not 0 <= head < HEADS:
        return None
    try:
        return kind(**fields)
    except TypeError:
        return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
