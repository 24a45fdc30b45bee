"""What a trained transformer says about the theory.

probe           a model over a text: every prediction measured, with nulls and intervals; Findings
capture         one batch inside a model: queries, keys, values, and the stream about every sublayer
"""

from .run_probe import probe as probe
from .runs.findings import Findings as Findings, Finding as Finding, Claim as Claim, Token as Token
from .inside.capturing import capture as capture, Captured as Captured
from .inside.events import Attended as Attended, Passed as Passed, Normed as Normed
