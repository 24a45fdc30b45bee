"""Switching systems with known parameters, series drawn from them, and filters as references.

    turns             rotations by 1 and -1 radian in the plane, both coordinates observed
    one coordinate    rotations by 0.3 and 2 radians, the first coordinate observed
    outliers          a scalar, observed with variance 0.05 or 4

Two modes each, so that all mode histories of a short series can be enumerated: `exact` below is the Bayes estimate.

Read next: experiment.py (transformers beside these filters), ../../src/gradlogz/filters (the filters).
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradlogz._output_files import replaced
from gradlogz.filters import (
    Prior,
    SwitchingModel,
    attentive_imm,
    enumerate_modes,
    fit_eta,
    gpb1,
    gpb2,
    imm,
    rao_blackwell_filter,
)
from gradlogz.filters.results import Filtered

from ..tasks import Batch, generator_of

STEPS = 12  # of a series: 2^13 mode histories
FIRST = 4  # index of the first observation whose prediction is judged
PARTICLES = (10, 100)
REGRESSION_SERIES, FIT_SERIES = 20_000, 300
TRAINING, REFERENCE, REGRESSION, FITTING, SAMPLING = range(5)  # streams of random numbers


class System(NamedTuple):
    """A switching model, and the distribution of its state at time 0."""

    model: SwitchingModel
    prior: Prior


def _rotation(angle: float) -> Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def _system(F: list[Tensor], Q: float, H: Tensor, R: list[float], stay: float) -> System:
    observed, size = H.shape
    one = torch.eye(size, dtype=torch.float64)
    model = SwitchingModel(
        torch.tensor([[stay, 1 - stay], [1 - stay, stay]], dtype=torch.float64),
        F=0.95 * torch.stack(F),
        Q=Q * one.expand(2, size, size),
        H=H.expand(2, observed, size),
        R=torch.stack([r * torch.eye(observed, dtype=torch.float64) for r in R]),
    )
    return System(model, Prior(torch.zeros(size, dtype=torch.float64), one))


PLANE, LINE = torch.eye(2, dtype=torch.float64), torch.eye(1, dtype=torch.float64)
SYSTEMS = {
    "turns": _system([_rotation(1.0), _rotation(-1.0)], 0.1, PLANE, [0.2, 0.2], stay=0.9),
    "one coordinate": _system([_rotation(0.3), _rotation(2.0)], 0.1, PLANE[:1], [0.2, 0.2], stay=0.8),
    "outliers": _system([LINE, LINE], 0.1, LINE, [0.05, 4.0], stay=0.8),
}


class Drawn(NamedTuple):
    """Observations [n, t, o] and modes [n, t]."""

    observations: Tensor
    modes: Tensor


def drawn(system: System, number: int, generator: torch.Generator, steps: int = STEPS) -> Drawn:
    """Draw series from a system."""
    model, prior = system
    n, s, o = number, model.state_size, model.H.shape[-2]
    root_Q, root_R = torch.linalg.cholesky(model.Q), torch.linalg.cholesky(model.R)
    assert isinstance(model.transition, Tensor)

    def noise(root: Tensor, size: int) -> Tensor:
        standard = torch.randn(n, size, 1, dtype=torch.float64, generator=generator)
        return (root @ standard).squeeze(-1)

    mode = torch.randint(model.modes, (n,), generator=generator)
    x = prior.mean + noise(torch.linalg.cholesky(prior.covariance), s)
    observations, modes = [], []
    for _ in range(steps):
        mode = torch.multinomial(model.transition[mode], 1, generator=generator).squeeze(-1)
        x = torch.einsum("nij,nj->ni", model.F[mode], x) + noise(root_Q[mode], s)
        observations.append(torch.einsum("nij,nj->ni", model.H[mode], x) + noise(root_R[mode], o))
        modes.append(mode)
    return Drawn(torch.stack(observations, 1), torch.stack(modes, 1))


@dataclass(frozen=True)
class FilteringTask:
    """Predict each observation of a series from those before it, by squared error."""

    system: str
    batch_size: int

    def batch(self, seed: int, step: int) -> Batch:
        """New series in every step."""
        y = drawn(SYSTEMS[self.system], self.batch_size, generator_of(seed + 1, step)).observations.float()
        return Batch(y[:, :-1], y[:, 1:])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean squared error of the predicted observations."""
        return (model(batch.tokens) - batch.targets).square().sum(-1).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean squared error on the same series every time."""
        y = drawn(SYSTEMS[self.system], 500, generator_of(0, TRAINING)).observations.float()
        batch = Batch(y[:, :-1], y[:, 1:])
        return {"held_out_loss": float(self.loss(model, batch))}


# References -----------------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """Series that nothing was trained on, and what is known about them.

    Attributes:
        observations: [n, t, o].
        probability: exact filtered probability of the first mode, [n, t].
        variance: trace of the exact predictive covariance of each observation, [n, t].
        predictions: predicted means of observations by filter, [n, t, o]; "exact" and "linear" among them.
    """

    observations: Tensor
    probability: Tensor
    variance: Tensor
    predictions: dict[str, Tensor]


def reference(name: str, number: int, path: Path) -> Reference:
    """Draw and filter the reference series of a system, or read them."""
    if not path.exists():
        tensors = _computed(name, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as part:
            save_file({key: t.contiguous() for key, t in tensors.items()}, part)
    tensors = load_file(path)
    predictions = {k.removeprefix("prediction "): t for k, t in tensors.items() if k.startswith("prediction ")}
    return Reference(tensors["observations"], tensors["probability"], tensors["variance"], predictions)


def _computed(name: str, number: int) -> dict[str, Tensor]:
    system = SYSTEMS[name]
    model, prior = system
    y = drawn(system, number, generator_of(0, REFERENCE)).observations
    parts = [_exact(system, part) for part in y.split(50)]
    mean, probability, variance = (torch.cat(column) for column in zip(*parts, strict=True))
    generator = generator_of(0, SAMPLING)
    filters: dict[str, Filtered] = {f.__name__: f(model, y, prior) for f in (gpb1, imm, gpb2)}
    for n in PARTICLES:
        filters[f"{n} particles"] = rao_blackwell_filter(model, y, prior, particles=n, generator=generator).filtered
    filters["attention"] = attention_filter(system, y)
    predictions = {"exact": mean, "linear": linear_prediction(system, y)}
    predictions |= {key: y - filtered.innovation for key, filtered in filters.items()}
    tensors = {"observations": y, "probability": probability, "variance": variance}
    return tensors | {f"prediction {key}": t for key, t in predictions.items()}


def _exact(system: System, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted mean, probability of the first mode, and trace of the predictive covariance, by enumeration."""
    f = enumerate_modes(system.model, y, system.prior).filtered
    variance = f.innovation_covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return y - f.innovation, f.log_mode_probability[..., 0].exp(), variance


def attention_filter(system: System, y: Tensor) -> Filtered:
    """The IMM filter with attention for a transition matrix: P(j | i) = softmax_j <mu_i, eta_j>, eta fitted."""
    uniform = dataclasses.replace(system.model, transition=torch.full((2, 2), 0.5, dtype=torch.float64))
    series = drawn(system, FIT_SERIES, generator_of(0, FITTING)).observations
    eta = fit_eta(uniform, series, system.prior, method="imm", max_iterations=10).eta
    return attentive_imm(uniform, y, system.prior, eta=eta)


def linear_prediction(system: System, y: Tensor) -> Tensor:
    """The best affine prediction of each observation from all before it, by least squares on other series."""
    series = drawn(system, REGRESSION_SERIES, generator_of(0, REGRESSION)).observations
    predictions = []
    for t in range(y.shape[1]):
        past, new_past = (torch.cat((each[:, :t].flatten(1), torch.ones(len(each), 1)), 1) for each in (series, y))
        predictions.append(new_past @ torch.linalg.lstsq(past, series[:, t]).solution)
    return torch.stack(predictions, 1)
