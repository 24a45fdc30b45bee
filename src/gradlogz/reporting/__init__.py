"""What people look at: terminal tables, notebook displays, figures and pages of results.

report          the page of a result: a run of the probe, a simulation, a phase diagram, tracks
compare         several runs of the probe side by side, with trends over training
"""

from .._displays import register
from ..probing.findings import Findings
from .comparison_page import compare
from .findings_figures import plot
from .findings_notebook import notebook_html
from .findings_terminal import plain_lines, rich_table
from .pages_by_result import report

register(Findings, "html", notebook_html)
register(Findings, "terminal", rich_table)
register(Findings, "text", plain_lines)
register(Findings, "plot", plot)

__all__ = ["report", "compare"]
