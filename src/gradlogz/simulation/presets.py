"""Presets: named settings, each with a prediction of the theory.

    tables of theory 10    10.2 (descent), 10.3 (few tokens in many dimensions), 10.4 (the circle), row by row
    single runs            one for each other statement
    no preset              the grid of 10.1 (contraction, dimension, beta): use `sweep`

A prediction is a final state, an observable or both, with its range; alternatives are joined by "or":

    "clusters 2-4"            final state `clusters`, with a cluster count of 2 to 4
    "collapsed"               final state `collapsed`
    "displacement 0-0.01"     an observable at the end
    "start slope 0.28-0.30"   an observable at the start
    ""                        no prediction

Law: tests/simulation/test_presets_end_as_theory_expects.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .._errors import InputValueError
from .settings import SimulationSettings


@dataclass(frozen=True)
class Preset:
    """Named settings with the prediction of the theory (`expects`) and its source."""

    name: str
    description: str
    settings: SimulationSettings
    expects: str
    source: str


# Theory 10.2: descent with whitening, tau = -0.2 ----------------------------------------------------------------------

TABLE_10_2 = {
    # initial         d = 1        d = 2        d = 8
    "gaussian":     ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
    "uniform":      ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
    "laplace":      ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
    "exponential":  ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
}  # fmt: skip

# Theory 10.3: 1024 tokens on the sphere of radius sqrt(d); 4096 keys in 64 dimensions ---------------------------------

SELF_WEIGHTS = {  # d: (beta, self-weight, the attention weight of a token on itself)
    64: (0.125, "start self_weight 0.60-0.66"),
    256: (0.0625, "start self_weight 0.99-1"),
    768: (0.0361, "start self_weight 0.99-1"),
}
SLOPES = {  # beta: <attention, x> / |x|² of queries that are not keys; equal to beta below freezing at 0.51
    0.125: "start slope 0.122-0.127",
    0.3: "start slope 0.28-0.30",
    0.51: "start slope 0.36-0.44",
    1.0: "start slope 0.40-0.50",
}

# Theory 10.4: 400 tokens on the circle, tau = 0.5 ---------------------------------------------------------------------

CIRCLE = {5: "clusters 2-3", 20: "clusters 4-5", 80: "clusters 8-11"}

# Single runs ----------------------------------------------------------------------------------------------------------

DEFAULT = "whitening"
SINGLE = [
    Preset(
        DEFAULT, "Gaussian cloud under attention steps (ascent) and whitening, the setting of [shim22]: clusters form",
        SimulationSettings(), "clusters 9-10", "[theory 10.1]",
    ),
    Preset(
        "riccati", "no normalisation, small steps: the precision of a Gaussian cloud decreases linearly",
        SimulationSettings(dim=2, beta=0.5, tau=0.01, contraction="none", steps=50), "radius 1.9-2.1", "[theory 4.4]",
    ),
    Preset(
        "blow-up", "no normalisation, large steps: tokens diverge",
        SimulationSettings(tokens=200, dim=2, beta=1.0, tau=10.0, contraction="none", steps=400),
        "blow-up", "[theory 5.1]",
    ),
    Preset(
        "theorem-1", "Gaussian keys, moments restored to those of Theorem 1: every cloud with them is stationary",
        SimulationSettings(tokens=400, dim=2, beta=1.0, contraction="recoloring", initial="exponential", steps=40,
                           key_measure="gaussian", key_mean="1,-0.5", key_covariance="2,0.6/0.6,0.5"),
        "displacement 0-0.000000001", "[theory 4.1]",
    ),
    Preset(
        "theorem-1-resolvent", "Gaussian keys, any weight matrices, inverse of the step: every cloud is stationary",
        SimulationSettings(tokens=400, dim=2, beta=0.5, contraction="inverse_step", initial="exponential", steps=40,
                           key_measure="gaussian", key_mean="1,-0.5", key_covariance="2,0.6/0.6,0.5",
                           qk_matrix="1,0.3/-0.2,0.8", ov_matrix="0.5,0/0.4,1"),
        "displacement 0-0.000000001", "[theory 4.3]",
    ),
    Preset(
        "theorem-1-sampled", "4096 fixed Gaussian keys and whitening: a cloud of mean 0 and covariance I hardly moves",
        SimulationSettings(tokens=400, dim=2, beta=0.3, keys=4096, initial="uniform", steps=20),
        "displacement 0-0.01", "[theory 4.1]",
    ),
    Preset(
        "hopfield", "six fixed patterns, division by 1 + tau: each token retrieves a pattern",
        SimulationSettings(tokens=300, beta=4.0, contraction="shrinkage", initial="sphere", keys=6, steps=120),
        "clusters 4-6", "[theory 5.6]",
    ),
    Preset(
        "hopfield-warm", "six fixed patterns with beta diam² < 4: one fixed point, no retrieval",
        SimulationSettings(tokens=300, beta=0.1, contraction="shrinkage", initial="sphere", keys=6, steps=120),
        "collapsed", "[theory 5.7]",
    ),
    Preset(
        "resampling", "every token replaced by one drawn with its attention weights: all descend from one in the end",
        SimulationSettings(tokens=100, dim=2, beta=0.1, tau=1.0, contraction="none", residual=False, draws=1,
                           steps=800),
        "collapsed", "[delmoral06]",
    ),
    Preset(
        "no-residual", "attention without residual connection: the convex hull shrinks to a point",
        SimulationSettings(tokens=200, dim=2, beta=0.2, tau=1.0, contraction="none", initial="exponential",
                           residual=False, steps=100),
        "collapsed", "[theory 5.5]",
    ),
    Preset(
        "causal", "causal mask on the sphere, small beta: all tokens converge to the first",
        SimulationSettings(tokens=200, dim=3, beta=1.0, contraction="sphere", initial="sphere", causal=True, steps=600),
        "collapsed", "[karagodin24]",
    ),
    Preset(
        "causal-cold", "causal mask on the circle, large beta: clusters form at early, isolated tokens",
        SimulationSettings(tokens=300, dim=2, beta=64.0, contraction="sphere", initial="circle", causal=True,
                           steps=600),
        "clusters 3-12", "[karagodin24]",
    ),
    Preset(
        "heads", "two heads of four coordinates each, whitening: the theory does not predict the cluster count",
        SimulationSettings(heads=2, steps=600), "", "[theory 3.9]",
    ),
]  # fmt: skip


def _dimensions(d: int) -> str:
    return "1 dimension" if d == 1 else f"{d} dimensions"


def _presets() -> list[Preset]:
    rows = []
    for initial, expected in TABLE_10_2.items():
        for d, expects in zip((1, 2, 8), expected, strict=True):
            name = initial.capitalize() if initial in ("gaussian", "laplace") else initial
            description = f"descent and whitening, {name} initial cloud in {_dimensions(d)}"
            beta = 0.2 if d == 8 else 0.3 if initial in ("laplace", "exponential") else 0.5
            settings = SimulationSettings(tokens=768 if d == 8 else 500, dim=d, beta=beta, tau=-0.2, initial=initial)
            rows.append(Preset(f"descent-{initial}-{d}", description, settings, expects, "[theory 10.2]"))
    for d, (beta, expects) in SELF_WEIGHTS.items():
        description = f"1024 tokens in {d} dimensions, beta = 1/sqrt(d): attention weight of a token on itself"
        settings = SimulationSettings(
            tokens=1024, dim=d, beta=beta, contraction="rms_norm", initial="sphere", steps=2, seeds=2
        )
        rows.append(Preset(f"self-weight-{d}", description, settings, expects, "[theory 10.3]"))
    for beta, expects in SLOPES.items():
        description = f"1024 queries and 4096 fixed keys, beta = {beta:g}: slope of attention along the query"
        settings = SimulationSettings(tokens=1024, dim=64, beta=beta, contraction="none", keys=4096, steps=1, seeds=2)
        rows.append(Preset(f"slope-{beta:g}", description, settings, expects, "[theory 10.3]"))
    for beta_, expects in CIRCLE.items():
        description = f"tokens on the circle, beta = {beta_}: metastable clusters"
        settings = SimulationSettings(
            tokens=400, dim=2, beta=float(beta_), contraction="sphere", initial="circle", steps=1000
        )
        rows.append(Preset(f"circle-{beta_}", description, settings, expects, "[theory 10.4]"))
    return SINGLE + rows


PRESETS = {preset.name: preset for preset in _presets()}


def preset_of(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        close = [known for known in PRESETS if name.split("-")[0] in known][:5]
        remedy = f"Similar names: {', '.join(close)}." if close else "List all presets with: gradlogz simulate --list."
        raise InputValueError("simulate", "preset", f"there is no preset {name!r}", remedy)
    return PRESETS[name]


class ExpectedOutcome(NamedTuple):
    """A predicted outcome: a final state or an observable ("start slope": at the start), and the range of its value.

    The value of a final state is the cluster count.
    """

    name: str
    low: float
    high: float


def outcomes(expects: str) -> list[ExpectedOutcome]:
    """Parse a prediction into its alternative outcomes.

    >>> outcomes("clusters 2-3 or collapsed")
    [ExpectedOutcome(name='clusters', low=2.0, high=3.0), ExpectedOutcome(name='collapsed', low=0.0, high=inf)]
    """
    parsed = []
    for alternative in expects.split(" or ") if expects else []:
        *words, last = alternative.split(" ")
        name, numbers = (" ".join(words), last) if last[0].isdigit() else (alternative, "")
        ends = [float(end) for end in numbers.split("-")] if numbers else [0.0, math.inf]
        parsed.append(ExpectedOutcome(name, ends[0], ends[-1]))
    return parsed


def meets(expects: str, kind: str, clusters: float, values: Mapping[str, float]) -> bool:
    """Return True if a final state, its cluster count and its observables meet a prediction.

    values: observables at the end, and at the start under "start ...".
    """
    return any(
        outcome.low <= (clusters if outcome.name == kind else values.get(outcome.name, math.nan)) <= outcome.high
        for outcome in outcomes(expects)
    )
