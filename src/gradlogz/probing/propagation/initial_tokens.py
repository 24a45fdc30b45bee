"""Initial tokens for the layers of a model.

    gaussian     N(mean, covariance) of the tokens of a text where they enter the layers
    standard     N(0, I)
    sphere       uniform on the sphere whose radius is the root mean square norm of these tokens
    text         these tokens themselves

Read next: run_propagation.py.
"""

from typing import Literal, NamedTuple

import torch

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ...dynamics.contraction import moments_of
from ...dynamics.gaussian_cloud import GaussianCloud

Start = Literal["gaussian", "standard", "sphere", "text"]
STARTS: tuple[Start, ...] = ("gaussian", "standard", "sphere", "text")


class TextMoments(NamedTuple):
    """Mean, covariance and root mean square norm of the tokens of a text."""

    gaussian: GaussianCloud
    radius: float


def moments_of_text(tokens: Float[Tensor, "n D"]) -> TextMoments:
    """Return the moments of tokens, in float64."""
    x = tokens.double()
    return TextMoments(GaussianCloud(*moments_of(x)), float(x.square().sum(-1).mean().sqrt()))


def drawn(start: Start, n: int, moments: TextMoments, generator: torch.Generator) -> Float[Tensor, "n D"]:
    """Return n independent tokens of an initial distribution, in float64."""
    if start == "gaussian":
        return moments.gaussian.sample(n, generator=generator)
    z = torch.randn(n, len(moments.gaussian.mean), generator=generator, dtype=torch.float64)
    return z if start == "standard" else moments.radius * torch.nn.functional.normalize(z, dim=-1)


def check_start(call: str, start: str) -> None:
    """Raise if there is no initial distribution of this name."""
    if start not in STARTS:
        problem = f"there is no initial distribution {start!r}"
        raise InputValueError(call, "start", problem, f"Choose one of {', '.join(STARTS)}.")
