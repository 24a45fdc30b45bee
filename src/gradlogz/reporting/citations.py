"""The works that pages cite, read from references.bib: the one bibliography of the package.

The file holds simple entries: a field on each line, its value in braces, authors joined by "and". What it holds beyond
that is refused.

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
NAMED = 4  # authors of a work that are all named; of more, the first
KEY = r"[a-z]+[0-9]{2}[a-z]?"
ENTRY = re.compile(r"@(\w+)\{(" + KEY + r"),\n((?:  .*\n)+)\}\s*")
FIELD = re.compile(r"  (\w+) *= \{(.*)\},")
ACCENTS = {"'": "\u0301", '"': "\u0308", "=": "\u0304"}
LETTERS = {"L": "Ł"}


def cited(keys: Iterable[str]) -> tuple[Reference, ...]:
    """The works with these keys, in the order of the bibliography; last, by their key alone, those it does not hold.

    Findings that another version of the package wrote may cite such works.
    """
    wanted, known = dict.fromkeys(keys), bibliography()
    found = [reference for key, reference in known.items() if key in wanted]
    return (*found, *(Reference(key, "is not in this version's bibliography.") for key in wanted if key not in known))


def keys_in(texts: Iterable[str]) -> list[str]:
    """The keys that stand in brackets in texts, each once: "[shim22]", "[shim22, Eq. 4]"."""
    return list(dict.fromkeys(key for text in texts for key in re.findall(rf"\[({KEY})(?:,[^]]*)?\]", text)))


@cache
def bibliography() -> Mapping[str, Reference]:
    """Every work in references.bib, by its key."""
    return parse(BIBLIOGRAPHY.read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, Reference]:
    """The entries of BibTeX, each as "authors, title, where it appeared, year." and its number on arXiv."""
    found: dict[str, Reference] = {}
    place = 0
    while place < len(text):
        entry = ENTRY.match(text, place)
        lines = entry[3].splitlines() if entry else []
        fields = [FIELD.fullmatch(line) for line in lines]
        if entry is None or not all(fields) or entry[2] in found:
            line = text.count("\n", 0, place) + 1
            remedy = "Write one field on a line, its value in braces, under a key that no other entry has."
            raise InputValueError("citations", "text", f"an entry must be simple BibTeX, got line {line}", remedy)
        found[entry[2]] = _reference(entry[2], {field[1]: field[2] for field in fields if field})
        place = entry.end()
    return found


def _reference(key: str, fields: Mapping[str, str]) -> Reference:
    people = fields.get("author", fields.get("editor", "")).split(" and ")
    names = [_spelt(person.partition(",")[0]) for person in people]
    authors = f"{names[0]} et al." if len(names) > NAMED or "others" in names else ", ".join(names)
    venue = next((fields[name] for name in ("journal", "booktitle", "publisher", "institution") if name in fields), "")
    appeared = " ".join(filter(None, (_spelt(venue), fields.get("volume", ""))))
    text = ", ".join(filter(None, (authors, _spelt(fields.get("title", "")), appeared, fields.get("year", ""))))
    number = f"{fields['archiveprefix']} {fields['eprint']}" if "eprint" in fields else ""
    return Reference(key, f"{text}.", number)


def _spelt(value: str) -> str:
    """A value without the commands and braces of TeX."""
    letters = re.sub(r"\\(\w)(?=\})", lambda command: LETTERS[command[1]], value)
    accented = re.sub(r"""\\(['"=])(\w)""", lambda command: command[2] + ACCENTS[command[1]], letters)
    return unicodedata.normalize("NFC", re.sub("[{}]", "", accented)).replace("--", "–")
