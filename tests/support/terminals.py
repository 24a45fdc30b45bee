"""Consoles of tests: a terminal of some width, or none, whose output is kept."""

import io
import re

from rich.console import Console

from gradlogz.reporting.result_table import print_lines, terminal_width


def printed(lines_of, *, width=None, terminal=False, **options):
    """The text that a console prints of `lines_of(width)`; without a terminal its width is 80."""
    file = io.StringIO()
    console = Console(file=file, width=width if terminal else None, force_terminal=terminal, **options)
    print_lines(console, lines_of(width or terminal_width(console)))
    return file.getvalue()


def without_colours(text):
    """The text without escape sequences."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
