"""What a probe found, as pages.

report          one run: verdicts, maps of heads, every claim with its figures
compare         several runs side by side, with trends over training
"""

from .comparing import compare
from .pages import report

__all__ = ["report", "compare"]
