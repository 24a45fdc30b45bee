"""Findings as one file of JSON, and its one reader.

    facts                    of each model, by its name
    rows, claims, tokens     the records of records.py, field by field: NaN is null, infinities are words
    declarations             the texts of each prediction, by its name; files of format 1 have none

The reader is strict, and refuses the first problem that it meets, or lenient: then it leaves out what cannot be read
and makes a note of it.

Read next: run_folder.py (the folder that holds the file), records.py.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..._errors import InputValueError
from .findings import Findings
from .records import VERDICTS, Claim, Declaration, Finding, Quantity, Token

FINDINGS = "findings.json"
HEADS = 4096  # more than any layer has; a map of them would fill the memory
AGAIN = "Make the run again."
Record = TypeVar("Record", Finding, Claim, Token)


class Problems:
    """Problems that a reader meets: a strict one refuses the first, a lenient one makes a note of each."""

    def __init__(self, call: str, *, strict: bool) -> None:
        self.call, self.strict = call, strict
        self.notes: list[str] = []

    def meet(self, note: str, condition: str, fact: str, remedy: str = AGAIN) -> None:
        """Refuse in the form of every error if strict; else keep the note."""
        if self.strict:
            self.refuse(condition, fact, remedy)
        self.notes.append(note)

    def refuse(self, condition: str, fact: str, remedy: str = AGAIN) -> NoReturn:
        """Refuse whatever the reader is."""
        raise InputValueError(self.call, "path", f"{condition}, got {fact}", remedy)


def findings_to_json(findings: Findings) -> str:
    """Findings as JSON; NaN is null there, and infinities are words, which JSON has no numbers for."""
    records = {
        kind: [{name: _plain(value) for name, value in entry._asdict().items()} for entry in getattr(findings, kind)]
        for kind in ("rows", "claims", "tokens")
    }
    declarations = {
        name: {**each._asdict(), "quantities": {q: unit._asdict() for q, unit in each.quantities.items()}}
        for name, each in findings.declarations.items()
    }
    whole: dict[str, Any] = {"facts": {**findings.facts}, **records, "declarations": declarations}
    return json.dumps(whole, indent=1, allow_nan=False)


def write_findings(path: str | os.PathLike[str], findings: Findings) -> None:
    """Findings as one file of JSON."""
    Path(path).write_text(findings_to_json(findings) + "\n", encoding="utf-8")


def read_findings(path: str | os.PathLike[str]) -> Findings:
    """The findings that write_findings wrote."""
    problems = Problems("read_findings", strict=True)
    content = object_in(Path(path))
    if isinstance(content, str):
        problems.refuse(f"{Path(path).name} must be readable", content)
    return findings_in(content, problems)


def object_in(path: Path) -> dict[str, Any] | str:
    """The object that a file of JSON holds, or in a few words why there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError, RecursionError) as error:
        return f"damaged, {type(error).__name__}"
    return content if isinstance(content, dict) else f"damaged, {type(content).__name__}"


def findings_in(content: Mapping[str, Any], problems: Problems, name: str = "") -> Findings:
    """The findings in the object of a file.

    name: of the model where a lenient reader finds none.
    """
    rows = _entries(Finding, content, "rows", problems)
    claims = _entries(Claim, content, "claims", problems)
    tokens = _entries(Token, content, "tokens", problems)
    facts = content.get("facts")
    if not isinstance(facts, dict) or not all(isinstance(each, dict) for each in facts.values()):
        problems.meet(f"The facts of models in {FINDINGS} cannot be read.", "facts must be objects", "others")
        facts = {}
    if not problems.strict:
        entries: list[Any] = [*rows, *claims, *tokens]
        models = dict.fromkeys(entry.model for entry in entries)
        facts = {model: facts.get(model, {}) for model in models} or facts or {name: {}}
    return Findings(facts, rows, claims, tokens, _declarations(content, problems))


def _entries(record: type[Record], content: Mapping[str, Any], kind: str, problems: Problems) -> list[Record]:
    """The entries of a kind, without those that cannot be read."""
    given = content.get(kind)
    if not isinstance(given, list):
        problems.meet(f"There are no {kind} in {FINDINGS}.", f"{FINDINGS} must hold a list of {kind}", "none")
        return []
    entries = [entry for each in given if (entry := _entry(record, each)) is not None]
    if left := len(given) - len(entries):
        counts = f"{left} of {len(given)}"
        note = f"{counts} {kind} in {FINDINGS} cannot be read; they are left out."
        problems.meet(note, f"{kind} in {FINDINGS} must be readable", f"{counts} that are not")
    return entries if problems.strict else list({_identity(entry): entry for entry in entries}.values())


def _entry(record: type[Record], content: Any) -> Record | None:
    """The row, claim or token of its dictionary; None if it lacks something or holds what is not known."""
    if not isinstance(content, dict):
        return None
    fields: dict[str, Any] = {}
    for name, annotation in record.__annotations__.items():
        if name in content:
            value = content[name]
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
        return record(**fields)
    except TypeError:
        return None


def _identity(entry: Finding | Claim | Token) -> tuple[Any, ...]:
    if isinstance(entry, Finding):
        return entry[:6]
    return entry[:2] if isinstance(entry, Claim) else tuple(entry)


def _declarations(content: Mapping[str, Any], problems: Problems) -> dict[str, Declaration]:
    """What predictions declare, without what cannot be read; nothing in files of format 1."""
    given = content.get("declarations", {})
    found = {
        name: declared
        for name, each in (given.items() if isinstance(given, dict) else ())
        if (declared := _declaration(each)) is not None
    }
    if not isinstance(given, dict) or len(found) < len(given):
        note = f"Some of the declarations in {FINDINGS} cannot be read; names stand in their place."
        problems.meet(note, f"declarations in {FINDINGS} must be readable", "some that are not")
    return found


def _declaration(content: Any) -> Declaration | None:
    """The declaration of its dictionary; None if it lacks something or holds what is not text."""
    if not isinstance(content, dict) or not isinstance(content.get("quantities"), dict):
        return None
    lists: dict[str, Any] = {name: content.get(name, []) for name in ("method", "references")}
    texts: dict[str, Any] = {
        name: content.get(name) for name in Declaration._fields if name not in ("quantities", *lists)
    }
    if not all(isinstance(each, list) for each in lists.values()):
        return None
    if not all(isinstance(each, str) for each in (*texts.values(), *lists["method"], *lists["references"])):
        return None
    quantities = {name: unit for name, each in content["quantities"].items() if (unit := _quantity(each)) is not None}
    method, references = tuple(lists["method"]), tuple(lists["references"])
    return Declaration(**texts, quantities=quantities, method=method, references=references)


def _quantity(content: Any) -> Quantity | None:
    unit, formula = (content.get(name) if isinstance(content, dict) else None for name in Quantity._fields)
    return Quantity(unit, formula) if isinstance(unit, str) and isinstance(formula, str) else None


def _plain(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "infinity" if value > 0 else "-infinity"
