"""Names and messages for a terminal: control characters, which could move its cursor or retitle it, become visible."""

import unicodedata

HIDDEN = ("Cc", "Cf", "Zl", "Zp")  # control and format characters, among them those that reverse the order of text


def visible(text: str) -> str:
    """Return a text with control characters escaped, such as \\x1b; line breaks and tabs are kept."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in HIDDEN else _escaped(ord(c)) for c in text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
