"""Tests of the theory's predictions on trained transformers.

probe           every prediction measured on a text, with null values and confidence intervals; returns Findings
intervene       parts of a model removed, added to or replaced, and the change of its loss; returns Interventions
capture         queries, keys, values and the residual stream at every sublayer, for one batch
"""

from .run_probe import probe as probe
from .interventions.run_interventions import intervene as intervene
from .interventions.records import Interventions as Interventions, Effect as Effect
from .runs.findings import Findings as Findings, Finding as Finding, Claim as Claim, Token as Token
from .inside.capturing import capture as capture, Captured as Captured
from .inside.events import Attended as Attended, Passed as Passed, Normed as Normed
