"""Maps of verdicts, layers by heads, small enough for a notebook: plain SVG.

Read next: figures.py (the same as figures, with numbers).
"""

import html
from collections.abc import Sequence

from .figures import labels_of, told
from .records import VERDICTS, Finding

CELL = 11  # pixels of a head
GAP = 1


def inline_maps(rows: Sequence[Finding]) -> str:
    """One map for each prediction that judges heads, beside each other; first layers at the bottom."""
    judged = [row for row in rows if row.verdict and row.head is not None]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for row in judged:
        groups.setdefault((row.prediction, row.quantity), []).append(row)
    maps = [_map(f"{prediction}: {quantity}", each) for (prediction, quantity), each in groups.items()]
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.2em">{"".join(maps)}</div>' if maps else ""


def _map(title: str, rows: Sequence[Finding]) -> str:
    labels = labels_of(rows)
    places = {label: i for i, label in enumerate(dict.fromkeys(labels.values()))}
    width, height = CELL * (1 + max(row.head or 0 for row in rows)), CELL * len(places)
    cells = []
    for row in rows:
        label = labels[row.layer, row.call]
        x, y = CELL * (row.head or 0), height - CELL * (places[label] + 1)
        said = html.escape(told(row, label).replace("\n", ", "))
        square = f'x="{x}" y="{y}" width="{CELL - GAP}" height="{CELL - GAP}" fill="{VERDICTS[row.verdict][1]}"'
        cells.append(f"<rect {square}><title>{said}</title></rect>")
    name = html.escape(title)
    drawing = f'<svg width="{width}" height="{height}" role="img" aria-label="{name}">{"".join(cells)}</svg>'
    return f'<figure style="margin:0"><figcaption>{name}</figcaption>{drawing}</figure>'
