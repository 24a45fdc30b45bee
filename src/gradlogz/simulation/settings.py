"""Settings of a simulation: sizes, temperature, step size, contraction, initial distribution.

Read next: initial_clouds.py (the initial clouds), presets.py (named settings), run_simulation.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .._errors import InputValueError, sentence
from ..dynamics.contraction import NAMES, Given

CONTRACTIONS = (*NAMES, "resolvent")
INITIAL = ("gaussian", "uniform", "laplace", "exponential", "sphere", "circle")  # drawn by initial_clouds.py
PLACEMENTS = ("post", "pre", "peri")
CUSTOM = "given"  # initial distribution of a custom cloud


@dataclass(frozen=True)
class SimulationSettings:
    """Parameters of a simulation.

    Args:
        tokens: number of tokens of a cloud.
        dim: dimension of a token.
        beta: inverse temperature of attention.
        tau: step size; negative values descend.
        contraction: normalisation after each step; several are joined by "+" and applied in order: "center+rms_norm".
        initial: distribution of the initial tokens.
        steps: number of steps.
        placement: position of the contraction: "post", "pre" or "peri".
        causal: whether each token attends only to itself and earlier tokens.
        residual: whether the residual connection is kept.
        heads: number of heads; each has dim / heads coordinates, as in a transformer with identity weights.
        keys: number of frozen keys, drawn from `initial` if that is a sphere or circle, else Gaussian; with 0, tokens
            attend to each other.
        seeds: number of clouds.
        seed: seed of the first cloud; the others have the seeds that follow.
        every: recording interval in steps; 0 records on a logarithmic schedule: every step at first, then sixteen
            records per doubling of the time.
    """

    tokens: int = 500
    dim: int = 8
    beta: float = 0.354
    tau: float = 0.5
    contraction: str = "zca"
    initial: str = "gaussian"
    steps: int = 600
    placement: str = "post"
    causal: bool = False
    residual: bool = True
    heads: int = 1
    keys: int = 0
    seeds: int = 4
    seed: int = 0
    every: int = 0

    @property
    def contraction_names(self) -> Given:
        """The contraction as a name or a tuple of names, as `evolve` takes it."""
        names = tuple(self.contraction.split("+"))
        return names[0] if len(names) == 1 else names

    @property
    def recorded_steps(self) -> list[int]:
        """Steps at which observables are recorded; each is a multiple of its distance to the previous one."""
        times = [0]
        while (t := times[-1]) < self.steps:
            step = self.every or 1 << max(0, t.bit_length() - 5)
            while t + step > self.steps:
                step = 1 if self.every else step // 2
            times.append(t + step)
        return times if not self.every else [t for t in times if t % self.every == 0]


def check(settings: SimulationSettings) -> None:
    """Raise an error for settings that cannot be simulated."""
    for wrong, condition, fact, remedy in _refusals(settings):
        if wrong:
            raise InputValueError(sentence("simulate", condition, fact, remedy))


def _refusals(s: SimulationSettings) -> Iterator[tuple[bool, str, str, str]]:
    """Whether something is wrong, what must hold, what was given and what to do; later ones rely on earlier ones."""
    counts = {"tokens": 2, "dim": 1, "steps": 0, "heads": 1, "keys": 0, "seeds": 1, "every": 0}
    for name, least in counts.items():
        value = getattr(s, name)
        wrong = not isinstance(value, int) or value < least
        yield wrong, f"{name} must be an integer from {least} on", f"{value}", "Count in whole numbers."
    parts = s.contraction.split("+")
    unknown = [part for part in parts if part not in CONTRACTIONS]
    whitened = any(part in ("zca", "pca", "cholesky", "monge") for part in parts)
    yield from (
        (not (_is_finite(s.beta) and _is_finite(s.tau)), "beta and tau must be finite", f"{s.beta} and {s.tau}",
         "A negative tau descends."),
        (bool(unknown), "contraction must be known", f"{(unknown or parts)[0]!r}",
         f"It is one of {', '.join(CONTRACTIONS)}, or several joined by +."),
        (s.initial not in INITIAL, "initial must be known", f"{s.initial!r}", f"It is one of {', '.join(INITIAL)}."),
        (s.placement not in PLACEMENTS, "placement must be known", f"{s.placement!r}",
         f"It is one of {', '.join(PLACEMENTS)}."),
        (s.dim % s.heads != 0, "heads must divide dim", f"{s.heads} and {s.dim}",
         "Each head has dim / heads coordinates."),
        (s.causal and s.keys > 0, "keys must be 0 under a causal mask", f"{s.keys}",
         "Frozen keys have no order among the tokens: drop --causal or --keys."),
        (s.initial == "circle" and s.dim < 2, "dim must be at least 2 for a circle", f"{s.dim}", "Add --dim 2."),
        (whitened and s.tokens <= s.dim, "tokens must be more than dim under whitening", f"{s.tokens} and {s.dim}",
         "Take more tokens, or another contraction."),
    )  # fmt: skip


def _is_finite(value: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
