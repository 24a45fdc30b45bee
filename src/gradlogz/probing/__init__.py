"""Tests of the theory's predictions on trained transformers.

probe           every prediction measured on a text, with null values and confidence intervals; returns Findings
intervene       parts of a model removed, added to or replaced, and the change of its loss; returns Interventions
capture         queries, keys, values and the residual stream at every sublayer, for one batch
propagate       a sampled distribution of tokens through the layers of a model; returns Propagation
layer_dynamics  a trained layer as a step of the simulator, which `evolve` repeats; returns LayerDynamics
iterate_layer   that layer repeated on the tokens of layer_clouds; returns LayerIteration
"""

from .run_probe import probe as probe
from .interventions.run_interventions import intervene as intervene
from .interventions.records import Interventions as Interventions, Effect as Effect
from .runs.findings import Findings as Findings, Finding as Finding, Claim as Claim, Token as Token
from .inside.capturing import capture as capture, Captured as Captured
from .inside.events import Attended as Attended, Passed as Passed, Normed as Normed
from .propagation.layer_dynamics import layer_dynamics as layer_dynamics
from .propagation.layer_step import LayerDynamics as LayerDynamics
from .propagation.run_propagation import propagate as propagate
from .propagation.layer_iteration import iterate_layer as iterate_layer, layer_clouds as layer_clouds
from .propagation.records import Propagation as Propagation, LayerIteration as LayerIteration
