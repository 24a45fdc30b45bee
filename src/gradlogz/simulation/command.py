"""gradlogz simulate: run a preset or a sweep, show the verdicts, write the page.

Read next: run_simulation.py (one simulation), parameter_sweep.py (a grid of them).
"""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..page import as_json, check_drawing, check_file, write
from ..reporting import phases_page, report, simulation_page
from ..reporting.simulation_wording import agreement, verdict_sentence
from .grid import parse_grid
from .parameter_sweep import sweep
from .presets import DEFAULT, PRESETS
from .records import Simulation
from .run_simulation import simulate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def presets_command() -> int:
    """The presets, one line each: a table of rich would fold them, and piped into grep half of a line is lost."""
    rows = [
        ("preset", "theory expects", "where", "what"),
        *((p.name, p.expects or "nothing", p.source, p.says) for p in PRESETS.values()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, last in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last]))
    return 0


def simulate_command(
    preset: str | None, numbers: dict[str, Any], sweep: str | None, out: str | None, json: str | None, show: bool
) -> int:
    """Run, print and write; 2 with a sentence for what cannot be done."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=json == "-")
    path = Path(out or f"{'phases' if sweep else preset or 'simulation'}.html")
    try:
        check_file("simulate", "--out", path)
        if json not in (None, "-"):
            check_file("simulate", "--json", json)
        check_drawing("simulate")
        text, data = (
            _swept(console, sweep, preset, numbers) if sweep is not None else _simulated(console, preset, numbers)
        )
    except (ValueError, TypeError, ImportError) as refusal:
        Console(stderr=True, soft_wrap=True).print(escape(str(refusal)), highlight=False)
        return 2
    write(path, text)
    if json == "-":
        print(data)
    elif json is not None:
        write(json, f"{data}\n")
    console.print(f"page: {escape(str(path))} ({len(text) / 1e6:.1f} MB)", highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _simulated(console: "Console", preset: str | None, numbers: dict[str, Any]) -> tuple[str, str]:
    """The page and the data of one simulation, printed in short."""
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Steps", total=None)
        found = simulate(
            preset or DEFAULT,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            **numbers,
        )
        progress.update(task, description="Page")
        text, data = report(found), simulation_page.data_of(found)
    console.print(f"[bold]{escape(verdict_sentence(found))}[/]", highlight=False, soft_wrap=True)
    status, words = agreement(found)
    colour = {"agrees": "green", "departs": "red", "undecided": "yellow"}.get(status, "dim")
    console.print(f"[{colour}]{escape(words[0].upper() + words[1:])}.[/]", highlight=False, soft_wrap=True)
    console.print(_evidence(found, console.width))
    return text, as_json(data)


def _swept(console: "Console", text: str, preset: str | None, numbers: dict[str, Any]) -> tuple[str, str]:
    """The page and the data of a phase diagram, printed in short."""
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Places of the grid", total=None)
        found = sweep(
            parse_grid(text),
            preset=preset,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            **numbers,
        )
    console.print(f"[bold]{escape(phases_page.page_of(found).verdict.sentence)}[/]", highlight=False, soft_wrap=True)
    return report(found), as_json(phases_page.data_of(found))


def _evidence(found: Simulation, width: int) -> "Table":
    """Verdicts and their numbers, a row for each seed; where so many columns have no room, a column for each."""
    from rich.table import Table

    names = list(dict.fromkeys(name for v in found.verdicts for name in v.evidence))
    columns = [["seed", *(str(found.settings.seed + i) for i in range(len(found.verdicts)))]]
    columns.append(["verdict", *(v.kind for v in found.verdicts)])
    for name in names:
        numbers = [f"{v.evidence[name]:.3g}" if name in v.evidence else "" for v in found.verdicts]
        columns.append([name.replace("_", " "), *numbers])
    rows = list(zip(*columns, strict=True))
    if sum(max(map(len, column)) + 2 for column in columns) > width:
        rows = [tuple(column) for column in columns]
    table = Table(box=None, pad_edge=False, header_style="bold")
    words = "verdict" if rows[0][1] == "verdict" else "seed"  # the head of the column that holds no numbers
    for head in rows[0]:
        table.add_column(head, justify="left" if head == words else "right")
    for row in rows[1:]:
        table.add_row(*row)
    return table
