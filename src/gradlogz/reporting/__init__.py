"""Results as pages.

report          the page of a result: a run of the probe, a simulation, a phase diagram, tracks
compare         several runs of the probe side by side, with trends over training
"""

from .comparing import compare
from .pages_by_result import report

__all__ = ["report", "compare"]
