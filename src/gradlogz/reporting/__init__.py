"""What people look at: terminal tables, notebook displays, figures and pages of results.

report          one run: verdicts, maps of heads, every claim with its figures
compare         several runs side by side, with trends over training
"""

from .._displays import register
from ..probing.findings import Findings
from .comparison_page import compare
from .findings_figures import plot
from .findings_notebook import notebook_html
from .findings_page import report_of_run as report
from .findings_terminal import plain_lines, rich_table

register(Findings, "html", notebook_html)
register(Findings, "terminal", rich_table)
register(Findings, "text", plain_lines)
register(Findings, "plot", plot)

__all__ = ["report", "compare"]
