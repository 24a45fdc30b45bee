"""Terminal tables, notebook displays, figures and pages of results.

report          the page of a result: a run of the probe, a simulation, a phase diagram, tracks
compare         the page that compares several runs of the probe, with trends over training
"""

from .pages_by_result import report as report
from .comparison_page import compare as compare
