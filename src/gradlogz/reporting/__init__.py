"""What a probe found, as pages.

report          one run: verdicts, maps of heads, every claim with its figures
"""

from .pages import report

__all__ = ["report"]
