"""JSON file of findings, and its only reader.

    facts                    facts of each model, by its name
    rows, claims, tokens     the records of records.py, field by field: NaN is null, infinities are words
    declarations             the texts of each prediction, by its name; files of format 1 have none

Files of format 1 and 2 have sentences in place of details, remarks and counts; they become the `text` of a claim.

The strict reader raises at the first problem; the lenient one leaves out unreadable parts and notes them.

Read next: run_folder.py (the folder that holds the file), records.py.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..._errors import InputValueError
from ..._paths import is_plain_file
from .findings import Findings
from .records import SELF_CHECK, VERDICTS, Claim, Declaration, Detail, Finding, Label, Quantity, Remark, Token

FINDINGS = "findings.json"
HEADS = 4096  # largest plausible number of heads; a larger map would exhaust the memory
OLD_INCONCLUSIVE = "undecided"  # format 1 and 2  # plain-words: ok
OLD_KEYS = {"without_twin": "without_baseline", "twin": "baseline"}  # facts and times  # plain-words: ok
AGAIN = "Run the probe again."
Record = TypeVar("Record", Finding, Claim, Token)


class Problems:
    """Problems of a reader: a strict one raises at the first, a lenient one collects notes."""

    def __init__(self, call: str, *, strict: bool) -> None:
        self.call, self.strict = call, strict
        self.notes: list[str] = []

    def meet(self, note: str, problem: str, remedy: str = AGAIN) -> None:
        """Raise if strict; else add the note."""
        if self.strict:
            self.refuse(problem, remedy)
        self.notes.append(note)

    def refuse(self, problem: str, remedy: str = AGAIN) -> NoReturn:
        """Raise, strict or not."""
        raise InputValueError(self.call, "path", problem, remedy)


def findings_to_json(findings: Findings) -> str:
    """Findings as JSON; NaN becomes null, and infinities, which JSON cannot represent, become words."""
    records = {
        kind: [plain_record(entry) for entry in getattr(findings, kind)] for kind in ("rows", "claims", "tokens")
    }
    declarations = {name: plain_record(each) for name, each in findings.declarations.items()}
    content: dict[str, Any] = {"facts": {**findings.facts}, **records, "declarations": declarations}
    return json.dumps(content, indent=1, allow_nan=False)


def write_findings(path: str | os.PathLike[str], findings: Findings) -> None:
    """Write findings as one JSON file."""
    Path(path).write_text(findings_to_json(findings) + "\n", encoding="utf-8")


def read_findings(path: str | os.PathLike[str]) -> Findings:
    """Read the findings of a file of write_findings."""
    problems = Problems("read_findings", strict=True)
    content = object_in(Path(path))
    if isinstance(content, str):
        problems.refuse(f"{Path(path).name} is not readable ({content})")
    return findings_in(content, problems)


def object_in(path: Path) -> dict[str, Any] | str:
    """The object in a JSON file, or the reason why it cannot be read."""
    if not is_plain_file(path):
        return "a link, a pipe or no file" if os.path.lexists(path) else "no such file"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"damaged, {type(error).__name__}"
    return content if isinstance(content, dict) else f"damaged, {type(content).__name__}"


def findings_in(content: Mapping[str, Any], problems: Problems, name: str = "") -> Findings:
    """Findings from the object of a JSON file.

    name: name of the model if a lenient reader finds none.
    """
    rows = _entries(Finding, content, "rows", problems)
    claims = _entries(Claim, content, "claims", problems)
    tokens = _entries(Token, content, "tokens", problems)
    facts = content.get("facts")
    if not isinstance(facts, dict) or not all(isinstance(each, dict) for each in facts.values()):
        problems.meet(f"The facts of models in {FINDINGS} cannot be read.", f"the facts in {FINDINGS} are no objects")
        facts = {}
    facts = {model: renamed(each) for model, each in facts.items()}
    if not problems.strict:
        entries: list[Any] = [*rows, *claims, *tokens]
        models = dict.fromkeys(entry.model for entry in entries)
        facts = {model: facts.get(model, {}) for model in models} or facts or {name: {}}
    return Findings(facts, rows, claims, tokens, _declarations(content, problems))


def renamed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Facts or times with the keys of this format."""
    return {OLD_KEYS.get(key, key): value for key, value in content.items()}


def _entries(record: type[Record], content: Mapping[str, Any], kind: str, problems: Problems) -> list[Record]:
    """Entries of a kind, without unreadable ones."""
    stored = content.get(kind)
    if not isinstance(stored, list):
        problems.meet(f"There are no {kind} in {FINDINGS}.", f"{FINDINGS} has no list of {kind}")
        return []
    entries = [entry for each in stored if (entry := _entry(record, each)) is not None]
    if left := len(stored) - len(entries):
        counts = f"{left} of {len(stored)}"
        note = f"{counts} {kind} in {FINDINGS} cannot be read; they are left out."
        problems.meet(note, f"{counts} {kind} in {FINDINGS} are not readable")
    return entries if problems.strict else list({_identity(entry): entry for entry in entries}.values())


def _entry(record: type[Record], content: Any) -> Record | None:
    """The row, claim or token in a dictionary; None if a field is missing or invalid."""
    if not isinstance(content, dict):
        return None
    fields = _fields(record, _upgraded(content))
    if fields is None:
        return None
    head = fields.get("head")
    if fields.get("verdict", "") not in ("", *VERDICTS) or isinstance(head, bool) or not isinstance(head, int | None):
        return None
    if head is not None and not 0 <= head < HEADS:
        return None
    for name, parse in (("details", _detail), ("remarks", _remark)):
        if name in fields:
            parts = [parse(each) for each in fields[name]] if isinstance(fields[name], list) else [None]
            if None in parts:
                return None
            fields[name] = tuple(parts)
    try:
        return record(**fields)
    except TypeError:
        return None


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """A row or claim of an older format in the form of this one."""
    if content.get("verdict") == OLD_INCONCLUSIVE:
        content = {**content, "verdict": "inconclusive"}
    texts = [content.get(name) for name in ("words", "note")]
    if isinstance(texts[0], str) and "text" not in content:
        content = {**content, "text": " ".join(text for text in texts if isinstance(text, str) and text)}
    return content


def _fields(record: type[Any], content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a record in a dictionary; None if a number or a text is of another type."""
    fields: dict[str, Any] = {}
    for name, annotation in record.__annotations__.items():
        if name in content:
            value = content[name]
            try:
                fields[name] = (math.nan if value is None else float(value)) if annotation is float else value
            except (TypeError, ValueError, OverflowError):  # OverflowError: an integer beyond all floats
                return None
            if annotation in (str, int) and (not isinstance(value, annotation) or isinstance(value, bool)):
                return None
    return fields


def _detail(content: Any) -> Detail | None:
    fields = _fields(Detail, content) if isinstance(content, dict) else None
    if fields is None or "key" not in fields:
        return None
    counts = (fields.get(name) for name in ("count", "total"))
    return Detail(**fields) if all(isinstance(each, int | None) for each in counts) else None


def _remark(content: Any) -> Remark | None:
    fields = _fields(Remark, content) if isinstance(content, dict) else None
    if fields is None or "key" not in fields:
        return None
    numbers, layers = fields.get("numbers", {}), fields.get("layers", [])
    if not isinstance(numbers, dict) or not all(isinstance(each, int | float) for each in numbers.values()):
        return None
    if not isinstance(layers, list) or not all(isinstance(each, str) for each in layers):
        return None
    return Remark(fields["key"], numbers, tuple(layers))


def _identity(entry: Finding | Claim | Token) -> tuple[Any, ...]:
    if isinstance(entry, Finding):
        return entry[:6]
    return entry[:2] if isinstance(entry, Claim) else tuple(entry)


def _declarations(content: Mapping[str, Any], problems: Problems) -> dict[str, Declaration]:
    """Readable declarations of predictions; none in files of format 1."""
    stored = content.get("declarations", {})
    declarations = {
        name: declared
        for name, each in (stored.items() if isinstance(stored, dict) else ())
        if (declared := _declaration(each)) is not None
    }
    if not isinstance(stored, dict) or len(declarations) < len(stored):
        note = f"Some declarations in {FINDINGS} cannot be read; names replace their titles."
        problems.meet(note, f"some declarations in {FINDINGS} are not readable")
    return declarations


def _declaration(content: Any) -> Declaration | None:
    """The declaration in a dictionary; None if a required text is missing or a field is of another type."""
    if not isinstance(content, dict) or not isinstance(content.get("quantities"), dict):
        return None
    fields: dict[str, Any] = {}
    for name in Declaration._fields:
        if name not in content:
            continue  # files of format 2 have no words for results
        value = content[name]
        if name in ("method", "references", "outcomes"):
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                return None
            fields[name] = tuple(value)
        elif name in ("quantities", "details", "remarks", "labels", "places", "bounds"):
            if not isinstance(value, dict):
                return None
            parsed = {key: _declared(name, each) for key, each in value.items()}
            fields[name] = {key: each for key, each in parsed.items() if each is not None}
        elif isinstance(value, str):
            fields[name] = value
        else:
            return None
    if len(fields.get("outcomes", ("", ""))) != 2:
        return None
    if content.get("self_check"):  # format 3 before kinds
        fields["kind"] = SELF_CHECK
    try:
        return Declaration(**{"method": (), **fields})
    except TypeError:
        return None


def _declared(kind: str, content: Any) -> Quantity | Label | str | None:
    """An entry of the quantities, details, remarks, labels, places or bounds of a declaration."""
    if kind in ("remarks", "labels", "places", "bounds"):
        return content if isinstance(content, str) else None
    record: type[Quantity] | type[Label] = Quantity if kind == "quantities" else Label
    fields = _fields(record, content) if isinstance(content, dict) else None
    try:
        return None if fields is None else record(**fields)
    except TypeError:
        return None


def plain_record(entry: Any) -> dict[str, Any]:
    """A record as a dictionary of plain values, for JSON."""
    return {name: _plain(value) for name, value in entry._asdict().items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return plain_record(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "infinity" if value > 0 else "-infinity"
