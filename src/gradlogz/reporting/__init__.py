"""What people look at: terminal tables, notebook displays, figures and pages of results.

report          the page of a result: a run of the probe, a simulation, a phase diagram, tracks
compare         several runs of the probe side by side, with trends over training
"""

from .pages_by_result import report as report
from .comparison_page import compare as compare
