"""What a trained transformer says about the theory.

probe           a model over a text: every prediction measured, with nulls and intervals; Findings
capture         one batch inside a model: queries, keys, values, and the stream about every sublayer
"""

from .findings import Claim, Finding, Findings, Token
from .inside.capturing import Captured, capture
from .inside.events import Attended, Normed, Passed
from .run_probe import probe

__all__ = [
    "probe",
    "Findings",
    "Finding",
    "Claim",
    "Token",
    "capture",
    "Captured",
    "Attended",
    "Passed",
    "Normed",
]
