"""Links to files of the repository become names with their path: the site does not contain the files."""

import re
from typing import Any

LINK = re.compile(r"\[`?([^]`]+)`?\]\(\.\./((?:src|tests|examples)/[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace such links on pages of the top folder, where ../ is the repository."""
    if "/" in page.file.src_uri:
        return markdown
    return LINK.sub(r'<code title="\2">\1</code>', markdown)
