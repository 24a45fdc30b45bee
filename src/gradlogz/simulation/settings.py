"""What is simulated: the numbers of a run, and the clouds that it starts from.

    gaussian     N(0, 1)                    in each coordinate
    uniform      on [-sqrt 3, sqrt 3]       likewise: mean 0, variance 1
    laplace      of variance 1              likewise: heavy tails
    exponential  of variance 1, less 1      likewise: skewed
    sphere       uniform directions         of length 1 under the contraction `sphere`, else sqrt(d)
    circle       uniform on the unit circle of the first two coordinates

Read next: presets.py (settings with names), run_simulation.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .._errors import InputValueError, sentence
from .._typing import Float, Tensor
from ..dynamics.contraction import NAMES, Given
from ..dynamics.evolution import Ascent

CONTRACTIONS = (*NAMES, "resolvent")
PLACEMENTS = ("post", "pre", "peri")
OWN = "given"  # the start of a cloud of the user's own, whose law is not known


@dataclass(frozen=True)
class SimulationSettings:
    """The numbers of a run.

    Args:
        contraction: a name, or several joined by "+", first first: "center+rms_norm".
        heads: the coordinates are split among them, as in a transformer whose weights are the identity.
        keys: how many frozen keys the tokens attend to, of the law of a start on a sphere or circle, else Gaussian; 0:
            tokens attend to each other.
        residual: whether a token is added to what it attends to.
        seeds: how many clouds are run, from `seed` on.
        every: steps between two looks at the clouds; 0: each step at first, then ever fewer, sixteen for each doubling.
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
    def given(self) -> Given:
        """The contraction, as evolve takes it."""
        names = tuple(self.contraction.split("+"))
        return names[0] if len(names) == 1 else names

    @property
    def looks(self) -> list[int]:
        """The steps after which the clouds are looked at; each is a multiple of its distance to the one before."""
        times = [0]
        while (t := times[-1]) < self.steps:
            step = self.every or 1 << max(0, t.bit_length() - 5)
            while t + step > self.steps:
                step = 1 if self.every else step // 2
            times.append(t + step)
        return times if not self.every else [t for t in times if t % self.every == 0]


def check(settings: SimulationSettings) -> None:
    """Refuse what cannot be run."""
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
        (s.initial not in LAWS, "initial must be known", f"{s.initial!r}", f"It is one of {', '.join(LAWS)}."),
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


Law = Callable[[int, int, torch.Generator], Tensor]


def _uniform(n: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, d, generator=generator, dtype=torch.float64)


def _gaussian(n: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


def _waits(n: int, d: int, generator: torch.Generator) -> Tensor:
    return -torch.log1p(-_uniform(n, d, generator))


def _laplace(n: int, d: int, generator: torch.Generator) -> Tensor:
    return _waits(n, d, generator) * (2 * torch.randint(0, 2, (n, d), generator=generator) - 1) / math.sqrt(2)


def _circle(n: int, d: int, generator: torch.Generator) -> Tensor:
    angle = 2 * math.pi * _uniform(n, 1, generator)
    return torch.cat((angle.cos(), angle.sin(), torch.zeros(n, d - 2, dtype=torch.float64)), -1)


LAWS: dict[str, Law] = {
    "gaussian": _gaussian,
    "uniform": lambda n, d, generator: math.sqrt(3) * (2 * _uniform(n, d, generator) - 1),
    "laplace": _laplace,
    "exponential": lambda n, d, generator: _waits(n, d, generator) - 1,
    "sphere": lambda n, d, generator: torch.nn.functional.normalize(_gaussian(n, d, generator), dim=-1),
    "circle": _circle,
}


def starts(settings: SimulationSettings) -> Float[Tensor, "b n d"]:
    """The clouds at the start, one for each seed."""
    return torch.stack([_drawn(settings, settings.tokens, settings.seed + i) for i in range(settings.seeds)])


def ascent_of(settings: SimulationSettings) -> Ascent:
    """The step of attention of these settings; frozen keys are those of the seed before the first."""
    s, B, W, keys = settings, None, None, None
    if s.heads > 1:
        blocks = torch.eye(s.heads, dtype=torch.float64).repeat_interleave(s.dim // s.heads, 1)
        B = torch.diag_embed(blocks)
        W = s.heads * B  # heads are averaged; together they give back every coordinate
    if s.keys:
        law = s.initial if s.initial in ("sphere", "circle") else "gaussian"
        keys = _drawn(replace(s, initial=law), s.keys, s.seed - 1)
    return Ascent(tau=s.tau, beta=s.beta, B=B, W_v=W, keys=keys, causal=s.causal, residual=s.residual)


def _drawn(settings: SimulationSettings, n: int, seed: int) -> Tensor:
    cloud = LAWS[settings.initial](n, settings.dim, torch.Generator().manual_seed(seed % 2**63))
    unit = settings.initial != "sphere" or settings.contraction.split("+")[-1] == "sphere"
    return cloud if unit else math.sqrt(settings.dim) * cloud
