"""Classes of the measures that the operations of algebra.py return.

    Tilted        exp(<x, a> - G(a)) h       G(a + eta) - G(a)
    Convolution   x1 + x2, independent       G1 + G2
    Sum           h1 + h2                    log(exp G1 + exp G2)
    Product       (x1, x2), independent      G1(eta1) + G2(eta2)
    Pushforward   W x + b                    G(W^T eta) + <b, eta>
    Reweighted    c h                        G + log c

Each holds measures as fields and calls their methods; use the functions of algebra.py to build one.
"""

from collections.abc import Callable, Iterable

import torch

from .._errors import InputValueError, check_finite, check_floats, present, shape_of
from .._typing import Bool, Float, Tensor
from ..special import log_domain
from .gating import gate, gated_covariance, gated_covariance_product, gated_mean
from .measure import Measure, check_measures, mass_or_zero, measure
from .validation import check_domain, common_batch

Generator = torch.Generator | None


@measure
class Tilted(Measure):
    """exp(<x, by> - G(by)) h(dx)."""

    h: Measure
    by: Float[Tensor, "*#b d"]

    def __post_init__(self) -> None:
        check_measures("tilt", h=self.h)
        check_floats("tilt", by=self.by, **present(measure=self.h._reference()))
        if self.by.ndim != len(self.h.batch_shape) + 1 or self.by.shape[-1] != self.h.dim:
            condition = f"by must be [*b, d={self.h.dim}] with the {len(self.h.batch_shape)} batch dimensions of h"
            raise InputValueError(
                "tilt", "by", f"{condition}, got shape {shape_of(self.by)}", "Pass one tilt per measure."
            )
        common_batch("tilt", self.h.batch_shape, self.by.shape[:-1])
        if self.validate:
            check_finite("tilt", by=self.by)
            check_domain("tilt", self.h, self.by, "by")

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("tilt", self.h.batch_shape, self.by.shape[:-1])

    @property
    def dim(self) -> int:
        return self.h.dim

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self.h.log_normalizer(self._at(eta)) - mass_or_zero(self.h.log_normalizer(self.by.unsqueeze(-2)))

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self.h.mean(self._at(eta))

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        return self.h.covariance(self._at(eta))

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return self.h.covariance_product(self._at(eta), vector)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self.h.support(direction)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return self.h.in_domain(self._at(eta))

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: Generator = None
    ) -> Float[Tensor, "*s m d"]:
        return self.h.sample(self._at(eta), shape, generator=generator)

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor] | None:
        return self.h.atoms(self._at(eta))

    def _at(self, eta: Tensor) -> Tensor:
        return self.by.unsqueeze(-2) + eta


@measure
class Convolution(Measure):
    """Distribution of the sum of independent draws."""

    parts: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("convolve", *(h.batch_shape for h in self.parts))

    @property
    def dim(self) -> int:
        return self.parts[0].dim

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return _total(h.log_normalizer(eta) for h in self.parts)

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return _total(h.mean(eta) for h in self.parts)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        return _total(h.covariance(eta) for h in self.parts)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return _total(h.covariance_product(eta, vector) for h in self.parts)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return _total(h.support(direction) for h in self.parts)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return torch.stack([h.in_domain(eta) for h in self.parts]).all(0)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: Generator = None
    ) -> Float[Tensor, "*s m d"]:
        return _total(h.sample(eta, shape, generator=generator) for h in self.parts)


@measure
class Sum(Measure):
    """h1 + h2 + ..., gated by the log normalisers of its parts."""

    parts: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("add", *(h.batch_shape for h in self.parts))

    @property
    def dim(self) -> int:
        return self.parts[0].dim

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return log_domain.log_sum_exp(self._G(eta))

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return gated_mean(gate(self._G(eta)), self._means(eta))

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        r, means = gate(self._G(eta)), self._means(eta)
        covariances = torch.stack([h.covariance(eta) for h in self.parts], -3)
        return gated_covariance(r, means, gated_mean(r, means), covariances)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        r, means = gate(self._G(eta)), self._means(eta)
        products = torch.stack([h.covariance_product(eta, vector) for h in self.parts], -2)
        return gated_covariance_product(r, means, gated_mean(r, means), products, vector)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return torch.stack([h.support(direction) for h in self.parts]).amax(0)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return torch.stack([h.in_domain(eta) for h in self.parts]).all(0)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: Generator = None
    ) -> Float[Tensor, "*s m d"]:
        """Draw a part by its gate, then a point from it. Cost: one draw from every part."""
        winner = log_domain.draw(self._G(eta), shape, generator)[..., None, None]
        draws = torch.stack([h.sample(eta, shape, generator=generator) for h in self.parts], -2)
        return draws.take_along_dim(winner, -2).squeeze(-2)

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor] | None:
        atoms = [h.atoms(eta) for h in self.parts]
        if any(c is None for c in atoms):
            return None
        r = gate(self._G(eta))
        points = [c[0].expand(*eta.shape[:-2], *c[0].shape[-2:]) for c in atoms if c is not None]
        p = [r[..., k, None] * c[1] for k, c in enumerate(atoms) if c is not None]
        return torch.cat(points, -2), torch.cat(p, -1)

    def _G(self, eta: Tensor) -> Float[Tensor, "*b m k"]:
        return torch.stack([h.log_normalizer(eta) for h in self.parts], -1)

    def _means(self, eta: Tensor) -> Float[Tensor, "*b m k d"]:
        return torch.stack([h.mean(eta) for h in self.parts], -2)


@measure
class Product(Measure):
    """Independent blocks of coordinates."""

    parts: tuple[Measure, ...]

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("product", *(h.batch_shape for h in self.parts))

    @property
    def dim(self) -> int:
        return sum(h.dim for h in self.parts)

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return _total(self._blocks(lambda h: h.log_normalizer, eta))

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return torch.cat(self._blocks(lambda h: h.mean, eta), -1)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        rows, before = [], 0
        for block in self._blocks(lambda h: h.covariance, eta):
            after = self.dim - before - block.shape[-1]
            rows.append(torch.nn.functional.pad(block, (before, after)))
            before += block.shape[-1]
        return torch.cat(rows, -2)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return torch.cat(self._blocks(lambda h: h.covariance_product, eta, vector), -1)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return _total(self._blocks(lambda h: h.support, direction))

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return torch.stack(self._blocks(lambda h: h.in_domain, eta)).all(0)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: Generator = None
    ) -> Float[Tensor, "*s m d"]:
        return torch.cat(self._blocks(lambda h: lambda e: h.sample(e, shape, generator=generator), eta), -1)

    def _blocks(self, method: Callable[[Measure], Callable[..., Tensor]], *arguments: Tensor) -> list[Tensor]:
        """Statistic of every part at its block of coordinates, expanded to one batch."""
        sizes = [h.dim for h in self.parts]
        split = zip(self.parts, *(a.split(sizes, -1) for a in arguments), strict=True)
        return [method(h)(*blocks) for h, *blocks in split]


@measure
class Pushforward(Measure):
    """Distribution of W x + b."""

    h: Measure
    matrix: Float[Tensor, "*#b e d"]
    shift: Float[Tensor, "*#b e"] | None = None

    def __post_init__(self) -> None:
        W, b, batch = self.matrix, self.shift, self.h.batch_shape
        check_floats("pushforward", matrix=W, **present(shift=b, measure=self.h._reference()))
        if W.ndim != len(batch) + 2 or W.shape[-1] != self.h.dim:
            condition = f"matrix must be [*b, e, d={self.h.dim}] with the {len(batch)} batch dimensions of h"
            raise InputValueError(
                "pushforward",
                "matrix",
                f"{condition}, got shape {shape_of(W)}",
                "Pass the matrix that maps x to matrix @ x.",
            )
        if b is not None and (b.ndim != len(batch) + 1 or b.shape[-1] != W.shape[-2]):
            condition = f"shift must be [*b, e={W.shape[-2]}]"
            raise InputValueError(
                "pushforward",
                "shift",
                f"{condition}, got shape {shape_of(b)}",
                "Pass the vector that is added to matrix @ x.",
            )
        common_batch("pushforward", *self._batches())
        if self.validate:
            check_finite("pushforward", matrix=W, **present(shift=b))

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("pushforward", *self._batches())

    @property
    def dim(self) -> int:
        return self.matrix.shape[-2]

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        G = self.h.log_normalizer(eta @ self.matrix)
        return G if self.shift is None else G + (self.shift.unsqueeze(-2) * eta).sum(-1)

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self._forward(self.h.mean(eta @ self.matrix))

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        W = self.matrix.unsqueeze(-3)
        return W @ self.h.covariance(eta @ self.matrix) @ W.mT

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return self.h.covariance_product(eta @ self.matrix, vector @ self.matrix) @ self.matrix.mT

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        reach = self.h.support(direction @ self.matrix)
        return reach if self.shift is None else reach + (self.shift.unsqueeze(-2) * direction).sum(-1)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return self.h.in_domain(eta @ self.matrix)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: Generator = None
    ) -> Float[Tensor, "*s m d"]:
        return self._forward(self.h.sample(eta @ self.matrix, shape, generator=generator)).detach()

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor] | None:
        atoms = self.h.atoms(eta @ self.matrix)
        return None if atoms is None else (self._forward(atoms[0]), atoms[1])

    def _forward(self, x: Tensor) -> Tensor:
        y = x @ self.matrix.mT
        return y if self.shift is None else y + self.shift.unsqueeze(-2)

    def _batches(self) -> list[torch.Size]:
        batches = [self.h.batch_shape, self.matrix.shape[:-2]]
        return batches if self.shift is None else [*batches, self.shift.shape[:-1]]


@measure
class Reweighted(Measure):
    """exp(log_mass) h."""

    h: Measure
    log_mass: Float[Tensor, "*b"]

    def __post_init__(self) -> None:
        check_measures("reweight", h=self.h)
        check_floats("reweight", log_mass=self.log_mass, **present(measure=self.h._reference()))
        common_batch("reweight", self.h.batch_shape, self.log_mass.shape)
        if self.validate:
            check_finite("reweight", log_mass=self.log_mass)

    @property
    def batch_shape(self) -> torch.Size:
        return common_batch("reweight", self.h.batch_shape, self.log_mass.shape)

    @property
    def dim(self) -> int:
        return self.h.dim

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self.h.log_normalizer(eta) + self.log_mass.unsqueeze(-1)

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        return self.h.mean(eta)

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        return self.h.covariance(eta)

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        return self.h.covariance_product(eta, vector)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self.h.support(direction)

    def in_domain(self, eta: Float[Tensor, "*b m d"]) -> Bool[Tensor, "*b m"]:
        return self.h.in_domain(eta)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: Generator = None
    ) -> Float[Tensor, "*s m d"]:
        return self.h.sample(eta, shape, generator=generator)

    def atoms(self, eta: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor] | None:
        return self.h.atoms(eta)


def _total(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first
