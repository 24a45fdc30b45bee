"""Settings of a simulation: sizes, temperature, step size, contraction, initial distribution.

Read next: initial_clouds.py (the initial clouds), presets.py (named settings), run_simulation.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .._errors import InputValueError
from ..dynamics.contraction import NAMES, ContractionLike

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
        keys: number of fixed keys, drawn from `initial` if that is a sphere or circle, else Gaussian; with 0, tokens
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
    def contraction_names(self) -> ContractionLike:
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
    for wrong, argument, problem, remedy in _problems(settings):
        if wrong:
            raise InputValueError("simulate", argument, problem, remedy)


def _problems(s: SimulationSettings) -> Iterator[tuple[bool, str, str, str]]:
    """Possible problems: whether it occurs, argument, problem, remedy; later ones assume that earlier ones do not."""
    counts = {"tokens": 2, "dim": 1, "steps": 0, "heads": 1, "keys": 0, "seeds": 1, "every": 0}
    for name, least in counts.items():
        value = getattr(s, name)
        wrong = not isinstance(value, int) or value < least
        yield wrong, name, f"{name} must be an integer of at least {least}, got {value}", f"Pass {least} or more."
    parts = s.contraction.split("+")
    unknown = [part for part in parts if part not in CONTRACTIONS]
    whitened = any(part in ("zca", "pca", "cholesky", "monge") for part in parts)
    for name in ("beta", "tau"):
        value = getattr(s, name)
        yield not _is_finite(value), name, f"{name} must be a finite number, got {value}", "Pass a finite number."
    yield from (
        (bool(unknown), "contraction", f"there is no contraction {(unknown or parts)[0]!r}",
         f"Choose one of {', '.join(CONTRACTIONS)}, or join several with +."),
        (s.initial not in INITIAL, "initial", f"there is no initial distribution {s.initial!r}",
         f"Choose one of {', '.join(INITIAL)}."),
        (s.placement not in PLACEMENTS, "placement", f"there is no placement {s.placement!r}",
         f"Choose one of {', '.join(PLACEMENTS)}."),
        (s.dim % s.heads != 0, "heads", f"heads must divide dim, got {s.heads} heads and dim {s.dim}",
         "Choose a number of heads that divides dim."),
        (s.causal and s.keys > 0, "keys", f"keys must be 0 with a causal mask, got {s.keys}",
         "Drop causal or keys: fixed keys have no order relative to the tokens."),
        (s.initial == "circle" and s.dim < 2, "dim", f"dim must be at least 2 for initial 'circle', got {s.dim}",
         "Pass dim=2 (--dim 2) or more."),
        (whitened and s.tokens <= s.dim, "tokens",
         f"tokens must be larger than dim for whitening, got {s.tokens} tokens and dim {s.dim}",
         "Increase tokens, or choose another contraction."),
    )  # fmt: skip


def _is_finite(value: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
