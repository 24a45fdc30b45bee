"""gradlogz track: read, filter, say whether the filter is what it claims, write the page and the table.

Read next: run_tracking.py.
"""

import webbrowser
from pathlib import Path
from typing import Any

from ..page import as_json, check_drawing, check_file, write
from ..reporting import report, tracks_page
from ..reporting.tracks_wording import beside_truth, consistent, headline, skipped
from .run_tracking import track
from .table import check_table, write_table


def track_command(
    file: str | None, options: dict[str, Any], out: str | None, table: str | None, json: str | None, show: bool
) -> int:
    """Run, print and write; 2 with a sentence for what cannot be done."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=json == "-")
    path = Path(out or (f"{Path(file).stem}.html" if file else "track.html"))
    try:
        check_file("track", "--out", path)
        if table is not None:
            check_file("track", "--out-table", table)
            check_table(table)
        if json not in (None, "-"):
            check_file("track", "--json", json)
        check_drawing("track")
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("Reading", total=None)

            def tell(done: int, total: int) -> None:
                progress.update(task, description="Filtering", completed=done, total=total)

            found = track(file, progress=tell, **options)
            progress.update(task, description="Page", total=None)
            text, data = report(found), as_json(tracks_page.data_of(found)) if json is not None else ""
            if table is not None:
                progress.update(task, description="Table")
                write_table(found, table)
    except (ValueError, TypeError, ImportError) as refusal:
        Console(stderr=True, soft_wrap=True).print(escape(str(refusal)), highlight=False)
        return 2
    write(path, text)
    if json == "-":
        print(data)
    elif json is not None:
        write(json, f"{data}\n")
    colour = {"agrees": "green", "departs": "red"}.get(consistent(found.consistency), "dim")
    console.print(f"[bold {colour}]{escape(headline(found))}[/]", highlight=False, soft_wrap=True)
    for words in (beside_truth(found), skipped(found)):
        if words:
            console.print(escape(words), highlight=False, soft_wrap=True)
    if table is not None:
        console.print(f"table: {escape(str(table))}", highlight=False, soft_wrap=True)
    console.print(f"page: {escape(str(path))} ({len(text) / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(path.resolve().as_uri())
    return 0
