"""Dynamics of conjugate filters: maps that keep a distribution in its family.

    Discount(l)       eta' = l eta                       forgets, with unchanged expectation     every family
    Discount(l, e)    eta' = l eta + (1 - l) e           forgets towards a prior                 every family
    Reset(e)          eta' = e                           returns to a prior                      every family
    LinearMotion      x' = W x + b + N(0, Q)             only if the family is closed under it:      [theory 7.6]

    family                              closed under
    LinearGaussian                      all affine maps, and noise
    GammaPoisson, GammaExponential      positive scaling of each channel
    InverseWishartNormal                congruence X' = W X W^T, W invertible
    DirichletMultinomial                permutations
    BetaBinomial                        x' = x or 1 - x in each channel

and for the families that a measure generates, whose only statistic is x,

    Gaussian                            W S W^T = S, translations
    Gamma                               positive scaling of each coordinate
    InverseGaussian                     only the identity (scaling needs 1/x as a statistic)
    Wishart                             congruence
    Sphere                              rotations and reflections
    OneHot, Poisson                     permutations of coordinates;  Spins  with signs
    Empirical                           maps of the points onto themselves that change weights by exp<b, x>

Every other linear map leads to a new family with log normaliser G'(s) = G(W^T s): `pushforward`, as by a value matrix.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_floats, has_values, present, shape_of
from ..._typing import Float, Tensor
from ...measures import Empirical, Gamma, Gaussian, InverseGaussian, Measure, OneHot, Poisson, Sphere, Spins, Wishart
from ...measures.wishart import smat, svec
from ..moment_matching import symmetric
from .families import (
    BetaBinomial,
    ConjugateFamily,
    DirichletMultinomial,
    GammaExponential,
    GammaPoisson,
    InverseWishartNormal,
    LinearGaussian,
)


class Discount(NamedTuple):
    """Forgetting: eta' = factor eta, or towards a prior, eta' = factor eta + (1 - factor) prior.

    Without a prior and without observations the mean stays and the variance grows without bound; forgetting stops
    before the parameters underflow. The prior is [p] for all targets or [*b, p] for each.
    """

    factor: Float[Tensor, ""] | float
    prior: Float[Tensor, "*#b p"] | None = None


class Reset(NamedTuple):
    """Return to a prior: eta' = prior. The prior is [p] for all targets or [*b, p] for each."""

    prior: Float[Tensor, "*#b p"]


class LinearMotion(NamedTuple):
    """Linear map x' = matrix x + offset + N(0, noise), or X' = matrix X matrix^T for covariances."""

    matrix: Float[Tensor, "s s"]
    offset: Float[Tensor, "s"] | None = None
    noise: Float[Tensor, "s s"] | None = None


Dynamics = Discount | Reset | LinearMotion


class Closure(NamedTuple):
    """Result of `is_closed_under`: whether the family is closed under a map, and the reason."""

    closed: bool
    why: str


@without_autocast
def is_closed_under(family: ConjugateFamily | Measure, motion: LinearMotion) -> Closure:
    """Check whether a family is closed under x' = W x + b + N(0, Q).   [theory 7.6, E49]

    Law: tests/laws/test_closed_maps_keep_their_families.py.

    >>> import torch
    >>> from gradlogz.filters import GammaPoisson
    >>> is_closed_under(GammaPoisson(), LinearMotion(torch.tensor([[2.0]])))
    Closure(closed=True, why='a positive multiple of a Gamma variable is Gamma distributed')
    >>> is_closed_under(GammaPoisson(), LinearMotion(torch.tensor([[1.0]]), torch.tensor([3.0])))
    Closure(closed=False, why='Gamma distributions are closed only under positive scaling of each channel')
    """
    call = "is_closed_under"
    W, b, Q = motion
    check_floats(call, matrix=W, **present(offset=b, noise=Q))
    n = _dimension(family)
    sizes = (W.shape == (n, n), b is None or b.shape == (n,), Q is None or Q.shape == (n, n))
    if not all(sizes):
        condition = f"matrix must be [{n}, {n}], offset [{n}] and noise [{n}, {n}]"
        shapes = ", ".join(str(shape_of(t)) for t in (W, b, Q) if t is not None)
        raise InputValueError(
            call, "matrix", f"{condition}, got shapes {shapes}", "Match the size of the family's variable."
        )
    if not has_values(W):
        return Closure(True, "not checked while tracing")
    motion = LinearMotion(*(None if t is None else t.detach() for t in motion))  # type: ignore[arg-type]
    if isinstance(family, Gaussian):
        return _gaussian_measure(family, motion)
    if isinstance(family, Empirical):
        return _key_set(family, motion)
    return RULES.get(type(family), _UNKNOWN)(motion)


def check_dynamics(call: str, family: ConjugateFamily, motion: Dynamics) -> None:
    """Raise InputValueError unless the dynamics keep the family."""
    if isinstance(motion, Discount):
        factor = motion.factor.detach() if isinstance(motion.factor, Tensor) else motion.factor
        if isinstance(factor, Tensor) and factor.ndim:
            remedy = "Pass one Discount for each mode."
            raise InputValueError(
                call, "discount", f"discount must be one number, got shape {shape_of(factor)}", remedy
            )
        if (not isinstance(factor, Tensor) or has_values(factor)) and not 0 < float(factor) <= 1:
            remedy = "Use 1 to forget nothing, or Reset to forget all."
            raise InputValueError(
                call, "discount", f"discount must be above 0 and at most 1, got {float(factor):.4g}", remedy
            )
    if isinstance(motion, (Discount, Reset)):
        prior = motion.prior
        if prior is not None and prior.shape[-1:] != (family.size,):
            condition = f"the prior of {type(motion).__name__} must end in p={family.size} natural parameters"
            remedy = f"Make it with {type(family).__name__}.prior."
            raise InputValueError(call, "prior", f"{condition}, got shape {shape_of(prior)}", remedy)
        if prior is not None and has_values(prior) and not bool(family.in_domain(prior).all()):
            problem = f"the prior of {type(motion).__name__} is not normalisable: its parameters are outside the domain"
            raise InputValueError(call, "prior", problem, f"Make it with {type(family).__name__}.prior.")
        return
    closure = is_closed_under(family, motion)
    if not closure.closed:
        problem = f"{type(family).__name__} is not closed under this LinearMotion: {closure.why}"
        remedy = "Use Discount or Reset, which keep every family, or pushforward for a new one."
        raise InputValueError(call, "LinearMotion", problem, remedy)


def moved(family: ConjugateFamily, motion: Dynamics, natural: Float[Tensor, "*b g p"]) -> Float[Tensor, "*b g p"]:
    """Natural parameters of histories g after one step of these dynamics."""
    if isinstance(motion, Reset):
        return _for_histories(motion.prior).expand_as(natural)
    if isinstance(motion, Discount):
        if motion.prior is None:
            return family.forgotten(motion.factor, natural)
        return motion.factor * natural + (1 - motion.factor) * _for_histories(motion.prior)
    W, b, Q = motion
    if isinstance(family, LinearGaussian):
        m, P = family.parameters(natural)
        m, P = (W @ m.unsqueeze(-1)).squeeze(-1), symmetric(W @ P @ W.mT)
        return family._from(m if b is None else m + b, P if Q is None else P + Q)
    if isinstance(family, InverseWishartNormal):
        scale = symmetric(W @ smat(natural[..., :-1]) @ W.mT)
        return torch.cat((svec(scale), natural[..., -1:]), -1)
    if isinstance(family, DirichletMultinomial):
        return (W @ natural.unsqueeze(-1)).squeeze(-1)
    first, second = natural.unflatten(-1, (-1, 2)).unbind(-1)
    factor = W.diagonal()
    if isinstance(family, GammaPoisson):
        second = second / factor  # the rate
    elif isinstance(family, GammaExponential):
        first = first / factor  # the rate
    else:
        first, second = torch.where(factor > 0, first, second), torch.where(factor > 0, second, first)
    return torch.stack((first, second), -1).flatten(-2)


def _for_histories(prior: Float[Tensor, "*b p"]) -> Float[Tensor, "*c p"]:
    """Expand a prior over the histories of each target."""
    return prior if prior.ndim == 1 else prior.unsqueeze(-2)


# The table ---------------------------------------------------------------------------------------------------------


def _dimension(family: Any) -> int:
    """Dimension of the vector that a linear map acts on."""
    if isinstance(family, LinearGaussian):
        return family.H.shape[-1]
    if isinstance(family, (InverseWishartNormal, DirichletMultinomial, GammaPoisson, GammaExponential, BetaBinomial)):
        return family.observation_size
    if isinstance(family, Wishart):
        return family.covariance_matrix.shape[-1]
    if isinstance(family, Measure):
        return family.dim
    return int(family.observation_size)


def _near(a: Tensor, b: Tensor) -> bool:
    scale = max(float(b.abs().max()), 1.0) if b.numel() else 1.0
    return bool((a - b).abs().max() <= 1e3 * torch.finfo(a.dtype).eps * scale)


def _invertible(W: Tensor) -> bool:
    return int(torch.linalg.matrix_rank(W)) == W.shape[-1]


def _permutes(W: Tensor) -> bool:
    eye = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)
    return bool(((W == 0) | (W == 1)).all()) and _near(W @ W.mT, eye)


def _gaussian_state(motion: LinearMotion) -> Closure:
    W, _, Q = motion
    regular = _invertible(W) if Q is None else int(torch.linalg.cholesky_ex(Q).info) == 0 or _invertible(W)
    if regular:
        return Closure(True, "an affine map of a Gaussian variable plus Gaussian noise is Gaussian")
    return Closure(False, "the covariance would be singular, and has no natural parameters")


def _positive_scaling(why: str, what: str) -> Callable[[LinearMotion], Closure]:
    def rule(motion: LinearMotion) -> Closure:
        W, b, Q = motion
        diagonal = W.diagonal()
        plain = b is None and Q is None and bool((W == torch.diag(diagonal)).all()) and bool((diagonal > 0).all())
        return Closure(True, why) if plain else Closure(False, what)

    return rule


def _congruence(motion: LinearMotion) -> Closure:
    W, b, Q = motion
    if b is None and Q is None and _invertible(W):
        return Closure(True, "W X W^T has the scale matrix W Psi W^T")
    return Closure(False, "distributions of covariances are closed only under X' = W X W^T with W invertible")


def _permutation(what: str, *, signs: bool = False) -> Callable[[LinearMotion], Closure]:
    def rule(motion: LinearMotion) -> Closure:
        W, b, Q = motion
        if b is None and Q is None and _permutes(W.abs() if signs else W):
            return Closure(True, "the map permutes coordinates")
        return Closure(False, what)

    return rule


def _reflection(motion: LinearMotion) -> Closure:
    W, b, Q = motion
    diagonal = W.diagonal()
    offset = torch.zeros_like(diagonal) if b is None else b
    same, other = (diagonal == 1) & (offset == 0), (diagonal == -1) & (offset == 1)
    if Q is None and bool((W == torch.diag(diagonal)).all()) and bool((same | other).all()):
        return Closure(True, "1 - x has a Beta distribution with its parameters exchanged")
    return Closure(False, "Beta distributions are closed only under x' = x and x' = 1 - x")


def _gaussian_measure(family: Gaussian, motion: LinearMotion) -> Closure:
    W, _, Q = motion
    S = family.covariance(family.loc.detach().unsqueeze(-2) * 0).detach()
    if Q is None and _near(W @ S @ W.mT, S):
        return Closure(True, "W S W^T = S, and tilting shifts the mean")
    return Closure(
        False, "with x as the only statistic the covariance cannot change: W S W^T = S is needed, without noise"
    )


def _rotation(motion: LinearMotion) -> Closure:
    W, b, Q = motion
    if b is None and Q is None and _near(W @ W.mT, torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)):
        return Closure(True, "the map is orthogonal and preserves the sphere")
    return Closure(False, "distributions on a sphere are closed only under rotations and reflections")


def _key_set(family: Empirical, motion: LinearMotion) -> Closure:
    W, b, Q = motion
    x = family.points.detach()
    no = Closure(False, "the map must permute the points and change their weights only by a factor exp<b, x>")
    if Q is not None or x.ndim != 2:
        return no
    image = x @ W.mT if b is None else x @ W.mT + b
    distance = torch.cdist(image, x)
    near, place = distance.min(-1)
    scale = float(x.abs().max())
    if float(near.max()) > 1e3 * torch.finfo(x.dtype).eps * scale or len(place.unique()) != len(x):
        return no
    log_w = family.log_weights
    if log_w is not None:
        alive = log_w.detach() > -torch.inf
        if not bool((alive == alive[place]).all()):
            return no
        x, place, log_w = x[alive], place[alive], log_w.detach()
        change = (log_w[alive] - log_w[place]).unsqueeze(-1)  # log weight minus that of the image
        affine = torch.cat((family.points.detach()[place], torch.ones_like(x[:, :1])), -1)
        rest = change - affine @ (torch.linalg.pinv(affine) @ change)  # `affine` may be rank-deficient
        if float(rest.abs().max()) > 1e4 * torch.finfo(x.dtype).eps * max(float(change.abs().max()), 1.0):
            return no
    return Closure(True, "the map permutes the points, and tilting compensates the change of weights")


def _identity(what: str) -> Callable[[LinearMotion], Closure]:
    def rule(motion: LinearMotion) -> Closure:
        W, b, Q = motion
        plain = b is None and Q is None and bool((W == torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)).all())
        return Closure(True, "the map is the identity") if plain else Closure(False, what)

    return rule


_UNKNOWN = _identity("only the identity is known to keep this family")
_GAMMA = _positive_scaling(
    "a positive multiple of a Gamma variable is Gamma distributed",
    "Gamma distributions are closed only under positive scaling of each channel",
)

RULES: dict[type, Callable[[LinearMotion], Closure]] = {
    LinearGaussian: _gaussian_state,
    GammaPoisson: _GAMMA,
    GammaExponential: _GAMMA,
    InverseWishartNormal: _congruence,
    DirichletMultinomial: _permutation("Dirichlet distributions are closed only under permutations"),
    BetaBinomial: _reflection,
    Gamma: _GAMMA,
    InverseGaussian: _identity("scaling changes the shape parameter, which tilting by x cannot compensate"),
    Wishart: _congruence,
    Sphere: _rotation,
    OneHot: _permutation("categorical distributions are closed only under permutations"),
    Poisson: _permutation("Poisson distributions are closed only under permutations; thinning is not a linear map"),
    Spins: _permutation("distributions on the cube are closed only under permutations and sign changes", signs=True),
}
