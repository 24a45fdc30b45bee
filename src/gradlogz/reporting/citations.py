"""The works that pages cite, read from references.bib, the bibliography of the package.

The parser accepts simple entries only: one field per line, its value in braces, authors joined by "and".

Read next: ../references.bib, findings_page.py and the other pages.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from .._errors import InputValueError
from ..page import Reference

BIBLIOGRAPHY = Path(__file__).parent.parent / "references.bib"
NAMED = 4  # a work with more authors is cited by the first, et al.
KEY = r"[a-z]+[0-9]{2}[a-z]?"
ENTRY = re.compile(r"@(\w+)\{(" + KEY + r"),\n((?:  .*\n)+)\}\s*")
FIELD = re.compile(r"  (\w+) *= \{(.*)\},")
ACCENTS = {"'": "\u0301", '"': "\u0308", "=": "\u0304"}
LETTERS = {"L": "Ł"}


def cited(keys: Iterable[str]) -> tuple[Reference, ...]:
    """References of these keys in the order of the bibliography, followed by placeholders for unknown keys.

    Findings that another version of the package wrote may have unknown keys.
    """
    wanted, known = dict.fromkeys(keys), bibliography()
    references = [reference for key, reference in known.items() if key in wanted]
    unknown = [Reference(key, "Not in the bibliography of this version.") for key in wanted if key not in known]
    return (*references, *unknown)


def keys_in(texts: Iterable[str]) -> list[str]:
    """Distinct citation keys in texts: "[shim22]", "[shim22, Eq. 4]"."""
    return list(dict.fromkeys(key for text in texts for key in re.findall(rf"\[({KEY})(?:,[^]]*)?\]", text)))


@cache
def bibliography() -> Mapping[str, Reference]:
    """Every reference in references.bib, by key."""
    return parse(BIBLIOGRAPHY.read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Reference]:
    """References of a BibTeX file, each as "authors, title, venue, year." with its arXiv number."""
    references: dict[str, Reference] = {}
    place = 0
    while place < len(text):
        entry = ENTRY.match(text, place)
        lines = entry[3].splitlines() if entry else []
        fields = [FIELD.fullmatch(line) for line in lines]
        if entry is None or not all(fields) or entry[2] in references:
            line = text.count("\n", 0, place) + 1
            remedy = "Write one field per line, its value in braces, under a key that no other entry has."
            raise InputValueError("citations", "text", f"the BibTeX entry at line {line} cannot be parsed", remedy)
        references[entry[2]] = _reference(entry[2], {field[1]: field[2] for field in fields if field})
        place = entry.end()
    return references


def _reference(key: str, fields: Mapping[str, str]) -> Reference:
    people = fields.get("author", fields.get("editor", "")).split(" and ")
    names = [_unescaped(person.partition(",")[0]) for person in people]
    authors = f"{names[0]} et al." if len(names) > NAMED or "others" in names else ", ".join(names)
    venue = next((fields[name] for name in ("journal", "booktitle", "publisher", "institution") if name in fields), "")
    volume = " ".join(filter(None, (_unescaped(venue), fields.get("volume", ""))))
    text = ", ".join(filter(None, (authors, _unescaped(fields.get("title", "")), volume, fields.get("year", ""))))
    number = f"{fields['archiveprefix']} {fields['eprint']}" if "eprint" in fields else ""
    return Reference(key, f"{text}.", number)


def _unescaped(value: str) -> str:
    """A field as Unicode, without TeX commands and braces."""
    letters = re.sub(r"\\(\w)(?=\})", lambda command: LETTERS[command[1]], value)
    accented = re.sub(r"""\\(['"=])(\w)""", lambda command: command[2] + ACCENTS[command[1]], letters)
    return unicodedata.normalize("NFC", re.sub("[{}]", "", accented)).replace("--", "–")
