"""Losses as modules: with a learned temperature, and SigLIP with a learned scale and offset.

    temperature = exp(log_temperature),   log_temperature >= log(minimum)

The bound is kept by raising the parameter, as CLIP does after a step, so that its gradient can lead away from it.

Read next: losses/.
"""

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn

from .._errors import InputValueError
from .._typing import Float, Tensor
from .losses import (
    LossOptions,
    clip_loss,
    info_nce,
    n_pair,
    nca,
    nce,
    nt_xent,
    proxy_loss,
    ranking_nce,
    siglip,
    skip_gram,
    supervised_contrastive,
    triplet_loss,
)
from .validation import check_choice

LOSSES: dict[str, Callable[..., Tensor]] = {
    "info_nce": info_nce,
    "n_pair": n_pair,
    "clip_loss": clip_loss,
    "nt_xent": nt_xent,
    "supervised_contrastive": supervised_contrastive,
    "nca": nca,
    "skip_gram": skip_gram,
    "nce": nce,
    "ranking_nce": ranking_nce,
    "siglip": siglip,
    "proxy_loss": proxy_loss,
    "triplet_loss": triplet_loss,
}


class Contrastive(nn.Module):
    """Module of a loss and its temperature, which can be learned as exp of a parameter.

    Args:
        loss: name of a loss that has a temperature, or a function with the same signature.
        temperature: initial temperature, at least `minimum`.
        learn_temperature: make the logarithm of the temperature a parameter.
        minimum: lower bound of the temperature; CLIP's bound of 100 on the logit scale is a minimum of 0.01.
        options: keyword arguments of every call; a call may override them.

    >>> import torch
    >>> loss = Contrastive("clip_loss", temperature=0.07, learn_temperature=True, minimum=0.01, normalize=True)
    >>> loss(torch.randn(4, 8), torch.randn(4, 8)).backward()
    >>> loss.log_temperature.grad is not None
    True
    """

    def __init__(
        self,
        loss: str | Callable[..., Tensor],
        temperature: float = 1.0,
        learn_temperature: bool = False,
        *,
        minimum: float = 0.0,
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__()
        if isinstance(loss, str):
            check_choice("Contrastive", "loss", loss, tuple(LOSSES))
        if not 0 < temperature < math.inf:
            remedy = "Pass a positive number; small values sharpen the distribution."
            raise InputValueError(
                "Contrastive", "temperature", f"temperature must be positive and finite, got {temperature}", remedy
            )
        if temperature < minimum:
            problem = f"temperature must be at least minimum={minimum}, got {temperature}"
            raise InputValueError("Contrastive", "temperature", problem, "Start at the minimum or above it.")
        self.loss, self.minimum = LOSSES[loss] if isinstance(loss, str) else loss, minimum
        self.options: dict[str, Any] = {**options}
        logarithm = torch.tensor(math.log(temperature))
        if learn_temperature:
            self.log_temperature = nn.Parameter(logarithm)
        else:
            self.register_buffer("log_temperature", logarithm)

    @property
    def temperature(self) -> Float[Tensor, ""]:
        """Current temperature; a parameter below its bound is first raised to it."""
        if self.minimum > 0:
            with torch.no_grad():
                self.log_temperature.clamp_(min=math.log(self.minimum))
        return self.log_temperature.exp()

    def forward(self, *operands: Tensor, **arguments: Unpack[LossOptions]) -> Tensor:
        """Loss of these operands at the current temperature."""
        options: dict[str, Any] = {**self.options, **arguments}
        return self.loss(*operands, temperature=self.temperature, **options)

    def extra_repr(self) -> str:
        learned = isinstance(self.log_temperature, nn.Parameter)
        words = [
            getattr(self.loss, "__name__", str(self.loss)),
            f"temperature={self.log_temperature.detach().exp().item():.4g}",
        ]
        words += [f"learn_temperature={learned}"] + ([f"minimum={self.minimum}"] if self.minimum else [])
        return ", ".join(words + [f"{name}={value}" for name, value in self.options.items()])


class SigLIP(nn.Module):
    """SigLIP loss with learned scale 1 / temperature and offset, at their published initial values.   [zhai23b]

        loss_i = -log sigmoid(z_ii) - sum_{j != i} log sigmoid(-z_ij),   z_ij = exp(log_scale) cos(a_i, b_j) + offset

    Args:
        scale: initial scale of the cosines.
        offset: initial offset; about -log of the number of negatives, so that the first steps do not have to learn that
            most pairs are negative.

    >>> import torch
    >>> loss = SigLIP()
    >>> loss(torch.randn(4, 8), torch.randn(4, 8)).backward()
    >>> [name for name, _ in loss.named_parameters()]
    ['log_scale', 'offset']
    """

    def __init__(self, scale: float = 10.0, offset: float = -10.0) -> None:
        super().__init__()
        if not 0 < scale < math.inf:
            problem = f"scale must be positive and finite, got {scale}"
            raise InputValueError("SigLIP", "scale", problem, "Pass the inverse of the temperature.")
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.offset = nn.Parameter(torch.tensor(float(offset)))

    def forward(self, a: Float[Tensor, "m d"], b: Float[Tensor, "n d"], **arguments: Unpack[LossOptions]) -> Tensor:
        """Loss of pairs (a_i, b_i) of vectors of any length; arguments are those of `siglip`."""
        options: dict[str, Any] = {"normalize": True, **arguments}
        return siglip(a, b, temperature=torch.exp(-self.log_scale), offset=self.offset, **options)
