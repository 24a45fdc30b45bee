"""Attention as the mean field of a model of vector spins.

    p(s_1 ... s_n) ~ exp(beta (sum_i <b_i, s_i> + sum_{i<j} <s_i, J_ij s_j>)) prod_i h_i(ds_i)    spins with measure h
    m_i = ∇G_i(eta_i),   eta_i = beta (b_i + sum_j J_ij m_j)                   naive mean field: G, ∇G those of h
    log Z >= sum_i (G_i(eta_i) - <eta_i, m_i>) + beta (sum_i <b_i, m_i> + sum_{i<j} <m_i, J_ij m_j>)     for every eta

The response of a spin to its field is the attention of its measure. Which model is a transformer depends on h and J:

    h = points k_1 ... k_N, J = 0        softmax attention with queries beta b_i, exactly: independent spins
    h = points k_1 ... k_N, any J        attention whose queries are fields: the mean field of a Potts model of keys
    h_1 = N(0, I / beta), h_2 = points k_1 ... k_N, J_12 = I
                                         m_1 = att(m_1): the fixed points of a modern Hopfield network      [ramsauer20]
    h = N(0, I), J_ij = softmax_j(<x_i, B x_j>) with fields x_i
                                         m = x + J m: residual attention is its first iteration from m = x      [bal21]

In the last case couplings are the attention weights of the inputs. They are not symmetric, and no energy has them: the
model with (J + J^T) / 2 has one, and its mean field is another map. Of Gaussian spins the mean field gives exact means.

Read next: ising.py (h: the two signs), ../measures/gibbs.py (two spins), hopfield.py.
"""

import itertools
from dataclasses import dataclass
from typing import Unpack

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..measures.empirical import Empirical
from ..measures.measure import Measure
from .fixed_points import Equilibrium, EquilibriumOptions, equilibrium

MOST = 1 << 20  # largest number of joint states that are enumerated


@dataclass(frozen=True)
class VectorSpins:
    """n spins with values in R^d, a measure for each or one for all of them, pair couplings and fields.

    Args:
        measure: h, the measure of a free spin, or a tuple with one for each spin; without batch.
        couplings: J, [n, n] for couplings J_ij I, or [n, n, d, d]; J_ji = J_ij^T and J_ii = 0.
        fields: b, [n, d].

    Law: tests/laws/test_attention_is_a_mean_field.py.

    >>> import torch
    >>> keys, queries = torch.randn(7, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    >>> spins = VectorSpins(Empirical(keys), torch.zeros(4, 4, dtype=torch.float64), queries)
    >>> m = spins.mean_field(torch.zeros_like(queries)).state
    >>> torch.allclose(m, (queries @ keys.mT).softmax(-1) @ keys)
    True
    """

    measure: Measure | tuple[Measure, ...]
    couplings: Float[Tensor, "..."]
    fields: Float[Tensor, "n d"]

    def __post_init__(self) -> None:
        J, b = self.couplings, self.fields
        check_floats("VectorSpins", couplings=J, fields=b)
        n, d = b.shape if b.ndim == 2 else (-1, -1)
        measures = self.measure if isinstance(self.measure, tuple) else (self.measure,) * n
        sizes = {each.dim for each in measures}
        if (J.shape != (n, n) and J.shape != (n, n, d, d)) or len(measures) != n or sizes - {d}:
            fact = f"shapes {shape_of(J)} and {shape_of(b)} for {len(measures)} measures of size {sorted(sizes)}"
            condition = "couplings must be [n, n] or [n, n, d, d] and fields [n, d]"
            remedy = "Pass zeros for no fields."
            raise InputValueError("VectorSpins", "couplings", f"{condition}, got {fact}", remedy)
        turned = J.mT if J.ndim == 2 else J.permute(1, 0, 3, 2)
        diagonal = J.diagonal() if J.ndim == 2 else J.diagonal(dim1=0, dim2=1)
        if not torch.equal(J, turned) or bool((diagonal != 0).any()):
            problem = "couplings are not symmetric, J_ji = J_ij^T, with zeros on the diagonal"
            remedy = "Symmetrise them, and put couplings of a spin to itself into its measure."
            raise InputValueError("VectorSpins", "couplings", problem, remedy)

    def energy(self, spins: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b"]:
        """Energy -sum_i <b_i, s_i> - sum_{i<j} <s_i, J_ij s_j>, [*b]; for means, the mean energy of free spins."""
        return -(spins * (self.fields + self._coupled(spins) / 2)).sum((-2, -1))

    def update(self, means: Float[Tensor, "*b n d"], *, beta: float = 1.0) -> Float[Tensor, "*b n d"]:
        """One mean-field update of all spins at once, ∇G(beta (b + J m)), [*b, n, d]."""
        return self.means(beta * (self.fields + self._coupled(means)))

    def means(self, eta: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """Means ∇G_i(eta_i) of free spins, [*b, n, d]."""
        if isinstance(self.measure, tuple):
            return torch.stack([h.mean(e) for h, e in zip(self.measure, eta.unbind(-2), strict=True)], -2)
        return self.measure.mean(eta)

    def covariances(self, eta: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d d"]:
        """Covariances ∇²G_i(eta_i) of free spins, [*b, n, d, d]."""
        if isinstance(self.measure, tuple):
            return torch.stack([h.covariance(e) for h, e in zip(self.measure, eta.unbind(-2), strict=True)], -3)
        return self.measure.covariance(eta)

    def log_normalizers(self, eta: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
        """Log normalisers G_i(eta_i) of free spins, [*b, n]."""
        if isinstance(self.measure, tuple):
            return torch.stack([h.log_normalizer(e) for h, e in zip(self.measure, eta.unbind(-2), strict=True)], -1)
        return self.measure.log_normalizer(eta)

    def mean_field(
        self, means: Float[Tensor, "*b n d"], *, beta: float = 1.0, **options: Unpack[EquilibriumOptions]
    ) -> Equilibrium:
        """Solve m_i = ∇G(beta (b_i + sum_j J_ij m_j)) from a start; `options` are those of `equilibrium`.

        Solutions are stationary points of `bound`. Differentiable with respect to couplings, fields and measure.
        """
        if means.shape[-2:] != self.fields.shape:
            condition = f"means must be [*b, {', '.join(map(str, self.fields.shape))}]"
            remedy = "Pass one vector for each spin."
            raise InputValueError("VectorSpins.mean_field", "means", f"{condition}, got {shape_of(means)}", remedy)
        return equilibrium(lambda m: self.update(m, beta=beta), means, tokens_interact=True, **options)

    def bound(self, eta: Float[Tensor, "*b n d"], *, beta: float = 1.0) -> Float[Tensor, "*b"]:
        """Lower bound on log Z from independent spins with natural parameters eta: entropy minus beta energy, [*b]."""
        m = self.means(eta)
        return (self.log_normalizers(eta) - (eta * m).sum(-1)).sum(-1) - beta * self.energy(m)

    def second_order(self, eta: Float[Tensor, "*b n d"], *, beta: float = 1.0) -> Float[Tensor, "*b"]:
        """Estimate of log Z with the term of second order in the couplings (TAP), [*b]; no bound.

            bound(eta) + beta² sum_{i<j} tr(J_ij C_j J_ij^T C_i) / 2              C_i = ∇²G_i(eta_i)            [bal21]

        At the solution of the mean-field equations its error is of third order in J, that of `bound` of second order.
        """
        C = self.covariances(eta)
        d = self.fields.shape[-1]
        J = self.couplings
        J = J if J.ndim == 4 else J[:, :, None, None] * torch.eye(d, dtype=J.dtype, device=J.device)
        pairs = torch.einsum("ijab,...jbc,ijdc,...ida->...", J, C, J, C)
        return self.bound(eta, beta=beta) + beta**2 * pairs / 4

    def exact(self, *, beta: float = 1.0) -> Empirical:
        """The exact distribution of all spins, if they are points: a measure on the joint states [N^n, n d].

        Its log normaliser at 0 is log Z, and its mean at 0 has the means of all spins side by side.
        """
        weights = self.measure.log_weights if isinstance(self.measure, Empirical) else None
        if (
            not isinstance(self.measure, Empirical)
            or self.measure.points.ndim != 2
            or (weights is not None and weights.ndim != 1)
        ):
            remedy = "Sample or discretise the measure first, for example with gradlogz.measures.draw_particles."
            fact = type(self.measure).__name__
            problem = f"measure must be one Empirical without batch and without weights per query, got {fact}"
            raise InputTypeError("VectorSpins.exact", "measure", problem, remedy)
        points, n = self.measure.points, len(self.fields)
        if len(points) ** n > MOST:
            problem = f"measure has {len(points)} points for {n} spins, more than {MOST} joint states"
            raise InputValueError("VectorSpins.exact", "measure", problem, "Use fewer points or spins.")
        index = torch.tensor(list(itertools.product(range(len(points)), repeat=n)), device=points.device)
        states = points[index]  # [N^n, n, d]
        log_mass = -beta * self.energy(states)
        if weights is not None:
            log_mass = log_mass + weights[index].sum(-1)
        return Empirical(states.flatten(1), log_mass)

    def _coupled(self, spins: Tensor) -> Tensor:
        """sum_j J_ij s_j."""
        if self.couplings.ndim == 2:
            return self.couplings @ spins
        return torch.einsum("ijde,...je->...id", self.couplings, spins)
