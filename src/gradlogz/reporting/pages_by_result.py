"""The page of any result, chosen by its type, and its displays in notebooks and terminals.

    report(findings), report("runs/minilm")     findings of a probe, or the folder of a run
    report(simulation), report(phases)          a simulation, or a phase diagram
    report(tracks)                              filtered detections
    report(Verification(results))               verified statements of the theory
    report(interventions)                       effects of interventions on a model
    report(propagation), report(iteration)      a distribution through the layers of a model, or a repeated layer

A new kind of result needs a module with its page, and a line in PAGES.

Read next: findings_page.py, simulation_page.py, phases_page.py, tracks_page.py, verification_page.py (the pages),
../page (the layout).
"""

import os
from collections.abc import Callable
from functools import singledispatch
from html import escape
from typing import Any

from .._displays import register
from .._errors import InputTypeError
from .._output_files import write
from ..page import Page
from ..probing.interventions.records import Interventions
from ..probing.propagation.records import LayerIteration, Propagation
from ..probing.runs.findings import Findings
from ..simulation.records import Phases, Simulation
from ..tracking.records import Tracks
from ..verification.statement import Verification
from . import (
    findings_page,
    interventions_page,
    phases_page,
    propagation_page,
    simulation_page,
    tracks_page,
    verification_page,
)
from .findings_figures import plot
from .findings_notebook import notebook_html
from .findings_terminal import plain_lines, rich_table
from .interventions_page import with_interventions
from .run_contents import Source, contents_of

# The function that makes the page of each type of result.
PAGES: dict[type, Callable[[Any], Page]] = {
    Simulation: simulation_page.page_of,
    Phases: phases_page.page_of,
    Tracks: tracks_page.page_of,
    Verification: verification_page.page_of,
    Interventions: interventions_page.page_of,
    Propagation: propagation_page.page_of,
    LayerIteration: propagation_page.page_of_iteration,
}
Result = Source | Simulation | Phases | Tracks | Verification | Interventions | Propagation | LayerIteration


def report(result: Result, path: str | os.PathLike[str] | None = None) -> str:
    """HTML of the page of a result, one self-contained file; also written to `path` if it is not None.

    The page of a run that is damaged, incomplete or of another version shows what can be read and lists what is
    missing. Needs jinja2 and plotly, the extra [report].

    Args:
        result: findings, the folder of a run, a `Verification`, or the result of `simulate`, `sweep`, `track`,
            `intervene`, `propagate` or `iterate_layer`.
        path: output file, written atomically.
    """
    html = findings_page.rendered(page_of(result), "report")
    if path is not None:
        write(os.fspath(path), html)
    return html


@singledispatch
def page_of(result: Any) -> Page:
    """Page of a result, as data."""
    types = ", ".join(kind.__name__ for kind in PAGES)
    problem = f"result must be Findings, the path of a run folder, {types}, got {type(result).__name__}"
    raise InputTypeError("report", "result", problem, "Pass one of these.")


@page_of.register(Findings)
@page_of.register(str)
@page_of.register(os.PathLike)
def _(result: Source) -> Page:
    return with_interventions(findings_page.page_of_run(contents_of(result, "report")), result)


def framed(result: Result) -> str:
    """The page in an iframe for notebooks, isolated from the notebook's styles."""
    return f'<iframe srcdoc="{escape(report(result))}" style="width:100%;height:48rem;border:0"></iframe>'


for kind, page in PAGES.items():
    page_of.register(kind, page)
    register(kind, "html", framed)
register(Findings, "html", notebook_html)
register(Findings, "terminal", rich_table)
register(Findings, "text", plain_lines)
register(Findings, "plot", plot)
