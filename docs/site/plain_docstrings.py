"""Docstrings are plain text with formulas, not Markdown: keep <x, eta> and *b as they are written."""

import re
from typing import Any

from griffe import Class, Extension, Function, Module, Object

SECTIONS = {"Args:", "Returns:", "Attributes:", "Raises:"}


class PlainDocstrings(Extension):
    """Escape what Markdown would read as a tag, as emphasis or as a link, outside code; examples are code.

    To Markdown >>> is a quote in a quote in a quote, so that examples are fenced. A list needs an empty line before it.
    """

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring and isinstance(obj, (Class, Function, Module)):
            obj.docstring.value = "\n".join(_escaped(obj.docstring.value.splitlines()))


def _escaped(lines: list[str]) -> list[str]:
    out, in_section, in_example, in_list = [], False, False, False
    for line in [*lines, ""]:
        if line.startswith(">>>") and not in_example:
            in_example = True
            out += ["", "```pycon"]
        elif in_example and not line:
            in_example = False
            out.append("```")
        if line and not line.startswith(" "):
            in_section = line in SECTIONS
        if re.match(" *- ", line) and not in_section:
            out += [] if in_list else [""]
            in_list = True
        elif not line.startswith(" "):
            in_list = False
        code = in_example or (line.startswith("    ") and not in_section and not in_list)
        name, text = re.match(r"((?:    \w+: )?)(.*)", line).groups()  # the name of a parameter is no text
        out.append(line if code else name + "`".join(_part(i, p) for i, p in enumerate(text.split("`"))))
    return out


def _part(index: int, text: str) -> str:
    """Every second part lies between backticks and is code."""
    return text if index % 2 else re.sub(r"([*_[])", r"\\\1", text.replace("<", "&lt;").replace(">", "&gt;"))
