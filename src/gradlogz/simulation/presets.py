"""Runs with names, and what theory expects of each.

The tables are those of theory 10 as they stand there: 10.2 (descent), 10.3 (few tokens in many dimensions), 10.4 (the
circle); before them single runs that are worth seeing. The grid of 10.1 (contraction, dimension, beta) has no names: it
is what `sweep` is for. An expectation is read as it is written: "clusters 2-4", "collapsed", "clusters 2-3 or
collapsed", "displacement 0-0.01" (an observable at the end), "start slope 0.28-0.30" (at the start). Where theory
expects nothing it is empty.

Tests: tests/simulation/test_presets_end_as_theory_expects.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .._errors import InputValueError
from .settings import SimulationSettings


@dataclass(frozen=True)
class Preset:
    """A run with a name: its settings, what theory expects of it, and where it says so."""

    name: str
    says: str
    settings: SimulationSettings
    expects: str
    source: str


# Theory 10.2: descent with whitening, tau = -0.2 ----------------------------------------------------------------------

TABLE_10_2 = {
    # initial law     d = 1        d = 2        d = 8
    "gaussian":     ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
    "uniform":      ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
    "laplace":      ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
    "exponential":  ("gaussian",  "gaussian",  "sliced_wasserstein 0-0.05"),
}  # fmt: skip

# Theory 10.3: 1024 tokens on the sphere of radius sqrt(d); 4096 keys in 64 dimensions ---------------------------------

SELF_WEIGHTS = {  # d: (beta, the weight of a token on itself)
    64: (0.125, "start self_weight 0.60-0.66"),
    256: (0.0625, "start self_weight 0.99-1"),
    768: (0.0361, "start self_weight 0.99-1"),
}
SLOPES = {  # beta: <attention, x> / |x|² for queries that are no keys: beta until tokens freeze at 0.51
    0.125: "start slope 0.122-0.127",
    0.3: "start slope 0.28-0.30",
    0.51: "start slope 0.36-0.44",
    1.0: "start slope 0.40-0.50",
}

# Theory 10.4: 400 tokens on the circle, tau = 0.5 ---------------------------------------------------------------------

CIRCLE = {5: "clusters 2-3", 20: "clusters 4-5", 80: "clusters 8-11"}

# Runs that are worth seeing -------------------------------------------------------------------------------------------

DEFAULT = "whitening"
SINGLE = [
    Preset(
        DEFAULT, "a Gaussian cloud under ascent and whitening, as the paper has it: it does not stay one",
        SimulationSettings(), "clusters 9-10", "theory 10.1",
    ),
    Preset(
        "riccati", "no contraction, small steps: the precision of a Gaussian cloud falls in a straight line",
        SimulationSettings(dim=2, beta=0.5, tau=0.01, contraction="none", steps=50), "radius 1.9-2.1", "theory 4.4",
    ),
    Preset(
        "blow-up", "no contraction, large steps: the cloud leaves the finite numbers",
        SimulationSettings(tokens=200, dim=2, beta=1.0, tau=10.0, contraction="none", steps=400),
        "blow-up", "theory 5.1",
    ),
    Preset(
        "theorem-1", "frozen Gaussian keys and whitening: every law with these moments stays",
        SimulationSettings(tokens=400, dim=2, beta=0.3, keys=4096, initial="uniform", steps=20),
        "displacement 0-0.01", "theory 4.1",
    ),
    Preset(
        "hopfield", "six frozen patterns and a division by 1 + tau: each token retrieves one",
        SimulationSettings(tokens=300, beta=4.0, contraction="resolvent", initial="sphere", keys=6, steps=120),
        "clusters 4-6", "theory 5.6",
    ),
    Preset(
        "hopfield-warm", "the same where beta diam² < 4: one place of rest, nothing is retrieved",
        SimulationSettings(tokens=300, beta=0.1, contraction="resolvent", initial="sphere", keys=6, steps=120),
        "collapsed", "theory 5.7",
    ),
    Preset(
        "no-residual", "attention alone: the hull shrinks to a point",
        SimulationSettings(tokens=200, dim=2, beta=0.2, tau=1.0, contraction="none", initial="exponential",
                           residual=False, steps=100),
        "collapsed", "theory 5.5",
    ),
    Preset(
        "causal", "a causal mask on the sphere, warm: all tokens follow the first",
        SimulationSettings(tokens=200, dim=3, beta=1.0, contraction="sphere", initial="sphere", causal=True, steps=600),
        "collapsed", "[karagodin24]",
    ),
    Preset(
        "causal-cold", "a causal mask on the circle, cold: tokens gather at early tokens that none before attracts",
        SimulationSettings(tokens=300, dim=2, beta=64.0, contraction="sphere", initial="circle", causal=True,
                           steps=600),
        "clusters 3-12", "[karagodin24]",
    ),
    Preset(
        "heads", "two heads of four coordinates each, whitened: how many clusters they make theory leaves open",
        SimulationSettings(heads=2, steps=600), "", "theory 3.9",
    ),
]  # fmt: skip


def _dimensions(d: int) -> str:
    return "1 dimension" if d == 1 else f"{d} dimensions"


def _presets() -> list[Preset]:
    rows = []
    for initial, expected in TABLE_10_2.items():
        for d, expects in zip((1, 2, 8), expected, strict=True):
            says = f"descent and whitening, {initial} start in {_dimensions(d)}"
            beta = 0.2 if d == 8 else 0.3 if initial in ("laplace", "exponential") else 0.5
            settings = SimulationSettings(tokens=768 if d == 8 else 500, dim=d, beta=beta, tau=-0.2, initial=initial)
            rows.append(Preset(f"descent-{initial}-{d}", says, settings, expects, "theory 10.2"))
    for d, (beta, expects) in SELF_WEIGHTS.items():
        says = f"1024 tokens in {d} dimensions at beta 1/sqrt(d): the weight of a token on itself"
        settings = SimulationSettings(
            tokens=1024, dim=d, beta=beta, contraction="rms_norm", initial="sphere", steps=2, seeds=2
        )
        rows.append(Preset(f"self-weight-{d}", says, settings, expects, "theory 10.3"))
    for beta, expects in SLOPES.items():
        says = f"queries that are not among the 4096 keys, beta {beta:g}: how much of a query attention returns"
        settings = SimulationSettings(tokens=1024, dim=64, beta=beta, contraction="none", keys=4096, steps=1, seeds=2)
        rows.append(Preset(f"slope-{beta:g}", says, settings, expects, "theory 10.3"))
    for beta_, expects in CIRCLE.items():
        says = f"400 tokens on the circle at beta {beta_}"
        settings = SimulationSettings(
            tokens=400, dim=2, beta=float(beta_), contraction="sphere", initial="circle", steps=1000
        )
        rows.append(Preset(f"circle-{beta_}", says, settings, expects, "theory 10.4"))
    return SINGLE + rows


PRESETS = {preset.name: preset for preset in _presets()}


def preset_of(name: str) -> Preset:
    """A preset by its name."""
    if name not in PRESETS:
        close = [known for known in PRESETS if name.split("-")[0] in known][:5]
        remedy = f"Near to it: {', '.join(close)}." if close else "gradlogz simulate --list shows them."
        raise InputValueError("simulate", "preset", f"preset must be known, got {name!r}", remedy)
    return PRESETS[name]


def meets(expects: str, kind: str, clusters: float, values: Mapping[str, float]) -> bool:
    """Whether what was seen is what is expected, in the words of the tables above.

    values: observables at the end, and at the start under "start ...".
    """
    for outcome in expects.split(" or "):
        *words, last = outcome.split(" ")
        word, numbers = (" ".join(words), last) if last[0].isdigit() else (outcome, "")
        ends = [float(end) for end in numbers.split("-")] if numbers else [0.0, math.inf]
        value = clusters if word == kind else values.get(word, math.nan)
        if ends[0] <= value <= ends[-1]:
            return True
    return False
