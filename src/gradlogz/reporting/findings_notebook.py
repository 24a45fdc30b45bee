"""Findings in a notebook: a table of claims, and SVG maps of verdicts by layer and head.

Read next: findings_figures.py (figures with numbers), findings_terminal.py.
"""

import html
from collections.abc import Sequence

from ..probing.runs.findings import Findings
from ..probing.runs.records import Finding
from .findings_figures import hover_text, labels_of
from .findings_wording import Declarations, cautions, kind_of, quantity_label, sentences_of, verdict_sentence
from .formatting import STYLES, counts_of, decimals, interval, measured_line

CELL = 11  # pixels of a head
GAP = 1


def notebook_html(findings: Findings) -> str:
    """The table of claims for a notebook, with maps of the verdicts on heads below it."""
    columns = ("prediction", "kind", "claim", "value", "95 % CI", "null", "support/refute", "result", "verdict")
    pieces = []
    for model, facts in findings.facts.items():
        pieces.append(f"<p><b>{html.escape(model)}</b> {html.escape(measured_line(facts))}</p>")
        claims = [s for s in findings.summary() if s.model == model]
        sentences = (verdict_sentence(model, claims, findings.declarations), *cautions(facts))
        pieces.append(f"<p>{html.escape(' '.join(sentences))}</p>" if claims else "")
        heads = "".join(f"<th>{name}</th>" for name in columns)
        pieces.append(f"<table><thead><tr>{heads}</tr></thead><tbody>")
        for s in claims:
            colour = STYLES[s.verdict].hexadecimal if s.verdict else "inherit"
            texts = (
                s.prediction, kind_of(findings.declarations, s.prediction), s.claim, decimals(s.value),
                interval(s.low, s.high, decimals), decimals(s.null),
                counts_of(s), sentences_of(findings.declarations, s),
            )  # fmt: skip
            row = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
            pieces.append(f'<tr>{row}<td style="color:{colour};font-weight:600">{html.escape(s.verdict)}</td></tr>')
        pieces.append("</tbody></table>")
        pieces.append(inline_maps([row for row in findings.rows if row.model == model], findings.declarations))
    return "\n".join(pieces)


def inline_maps(rows: Sequence[Finding], declarations: Declarations) -> str:
    """One map for each prediction about heads, in a row; first layers at the bottom."""
    judged = [row for row in rows if row.verdict not in ("", "described") and row.head is not None]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for row in judged:
        groups.setdefault((row.prediction, row.quantity), []).append(row)
    maps = [
        _map(prediction, quantity_label(declarations, prediction, quantity), each)
        for (prediction, quantity), each in groups.items()
    ]
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.2em">{"".join(maps)}</div>' if maps else ""


def _map(prediction: str, quantity: str, rows: Sequence[Finding]) -> str:
    labels = labels_of(rows)
    places = {label: i for i, label in enumerate(dict.fromkeys(labels.values()))}
    width, height = CELL * (1 + max(row.head or 0 for row in rows)), CELL * len(places)
    cells = []
    for row in rows:
        label = labels[row.layer, row.call]
        x, y = CELL * (row.head or 0), height - CELL * (places[label] + 1)
        text = html.escape(hover_text(row, label, quantity).replace("\n", ", "))
        square = f'x="{x}" y="{y}" width="{CELL - GAP}" height="{CELL - GAP}" fill="{STYLES[row.verdict].hexadecimal}"'
        cells.append(f"<rect {square}><title>{text}</title></rect>")
    name = html.escape(f"{prediction}: {quantity}")
    drawing = f'<svg width="{width}" height="{height}" role="img" aria-label="{name}">{"".join(cells)}</svg>'
    return f'<figure style="margin:0"><figcaption>{name}</figcaption>{drawing}</figure>'
