"""Names from files of strangers, for places that give some characters a meaning: terminals and spreadsheets.

Read next: commands/outputs.py (the terminal), page/template.html (which escapes on its own).
"""

import unicodedata
from typing import Any

HIDDEN = ("Cc", "Cf", "Zl", "Zp")  # control and format characters, among them those that reverse the order of text
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of what a spreadsheet computes


def visible(text: str) -> str:
    """Return a text of the same length with control characters replaced by their pictures, such as ␛ for escape.

    Line breaks and tabs are kept; a terminal would obey the others.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in HIDDEN else _picture(ord(c)) for c in text)


def table_cell(value: Any) -> Any:
    """Return a cell of a CSV file: a text that a spreadsheet would compute has an apostrophe before it.

    Numbers, also those in a text, stay as they are.
    """
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 32 else "�"
