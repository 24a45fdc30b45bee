"""A layer at rest: a deep equilibrium between two linear maps, and sets of tokens around unknown centres.

    s = W_e t                                     tokens t of a set
    x* = N(x* + W_u s + att(x*))                  deq, shrinkage: the fixed point; unrolled: six steps
    output = W_d x*                               the centre of each token

Read next: experiment.py (what is measured at rest), ../../src/gradlogz/dynamics/equilibrium_attention.py.
"""

from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from gradlogz.dynamics import EquilibriumAttention
from gradlogz.dynamics.contraction import contraction_of

from ..tasks import Batch, generator_of
from ..transformer import Model

ArmName = Literal["deq", "unrolled", "shrinkage"]
ARMS = get_args(ArmName)
TOKENS, CENTRES, SIZE, NOISE = 24, 3, 8, 0.6
UNROLLED = 6


@dataclass(frozen=True)
class RestSettings:
    """Everything that determines a model, but its seed."""

    arm: ArmName
    width: int = 16
    heads: int = 2

    def as_dict(self) -> dict[str, Any]:
        """Settings as plain values."""
        return asdict(self)


class RestingModel(Model):
    """Centres [b, n, SIZE] of tokens [b, n, SIZE]."""

    def __init__(self, settings: RestSettings, *, seed: int) -> None:
        super().__init__()
        s = self.settings = settings
        contraction = "shrinkage" if s.arm == "shrinkage" else "layer_norm"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding, self.readout = nn.Linear(SIZE, s.width), nn.Linear(s.width, SIZE)
            self.layer = EquilibriumAttention(
                s.width, s.heads, contraction=contraction, moving=s.arm != "shrinkage", max_iterations=60,
                tolerance=1e-3, throw=False,
            )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """Centres."""
        s = self.embedding(tokens)
        if self.settings.arm != "unrolled":
            return self.readout(self.layer(s))
        x, f = self.start(s), self.layer.step(s)
        for _ in range(UNROLLED):
            x = f(x)
        return self.readout(x)

    def start(self, s: Tensor) -> Tensor:
        """Tokens before the first step: the contraction of the injection."""
        return contraction_of(self.layer.contraction, self.layer.tau)(self.layer.in_proj(s))

    def without_injection(self) -> "RestingModel":
        """A copy whose injection is 0."""
        copy = deepcopy(self)
        for parameter in copy.layer.in_proj.parameters():
            nn.init.zeros_(parameter)
        return copy


class Sets(NamedTuple):
    """Tokens [b, n, d], the number of the centre of each [b, n], and the centres [b, k, d]."""

    tokens: Tensor
    labels: Tensor
    centres: Tensor


def drawn(number: int, generator: torch.Generator) -> Sets:
    """Draw sets of tokens."""
    centres = torch.randn(number, CENTRES, SIZE, generator=generator)
    labels = torch.randint(CENTRES, (number, TOKENS), generator=generator)
    noise = NOISE * torch.randn(number, TOKENS, SIZE, generator=generator)
    return Sets(_of_labels(centres, labels) + noise, labels, centres)


def _of_labels(centres: Tensor, labels: Tensor) -> Tensor:
    return centres.gather(1, labels.unsqueeze(-1).expand(-1, -1, centres.shape[-1]))


def oracle(sets: Sets) -> Tensor:
    """Posterior means of the centres of the tokens given the labels, [b, n, d]: means, shrunk to 0."""
    members = nn.functional.one_hot(sets.labels, CENTRES).to(sets.tokens)
    sums, counts = members.mT @ sets.tokens, members.sum(1).unsqueeze(-1)
    return _of_labels(sums / (counts + NOISE**2), sets.labels)


@dataclass(frozen=True)
class CentreTask:
    """Find the centre of each token of a set."""

    batch_size: int = 16

    def batch(self, seed: int, step: int) -> Batch:
        """New sets in every step."""
        sets = drawn(self.batch_size, generator_of(seed + 1, step))
        return Batch(sets.tokens, _of_labels(sets.centres, sets.labels))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean squared error."""
        return (model(batch.tokens) - batch.targets).square().sum(-1).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean squared error on the same sets every time."""
        sets = drawn(32, generator_of(0, 0))
        return {"held_out_loss": float(self.loss(model, Batch(sets.tokens, _of_labels(sets.centres, sets.labels))))}
