"""Consoles of tests: a terminal of some width, or none, whose output is kept."""

import io
import re

from rich.console import Console


def printed(lines, **options):
    """The text that a console with these options prints."""
    console = Console(file=io.StringIO(), width=80, **options)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return console.file.getvalue()


def without_colours(text):
    """The text without escape sequences."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
