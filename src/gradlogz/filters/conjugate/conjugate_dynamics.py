"""What moves a family into itself: the dynamics that a conjugate filter may have.

    Discount(l)       eta' = l eta                       forgets, and keeps what is expected     every family
    Discount(l, e)    eta' = l eta + (1 - l) e           forgets towards a prior                 every family
    Reset(e)          eta' = e                           begins anew                             every family
    LinearMotion      x' = W x + b + N(0, Q)             only where the law stays in the family:     [theory 7.6]

    family                              closed under
    LinearGaussian                      all affine maps, and noise
    GammaPoisson, GammaExponential      positive scaling of each channel
    InverseWishartNormal                congruence X' = W X W^T, W invertible
    DirichletMultinomial                permutations
    BetaBinomial                        x' = x or 1 - x in each channel

and for the families that a measure generates, whose only statistic is x,

    Gaussian                            W S W^T = S, translations
    Gamma                               positive scaling of each coordinate
    InverseGaussian                     nothing but the identity (scaling needs 1/x as a statistic)
    Wishart                             congruence
    Sphere                              rotations and reflections
    OneHot, Poisson                     permutations of coordinates;  Spins  with signs
    Empirical                           maps of the points onto themselves, weights changed by exp<b, x> at most

For all others G'(s) = G(W^T s) is the log normaliser of a new family: `pushforward`, which is what a value matrix does.
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
    """eta' = factor eta, or towards a prior, eta' = factor eta + (1 - factor) prior: what was known counts for less.

    Without a prior, and with nothing seen for long, hardly a law is left: its mean stays, its variance grows without
    bound, and forgetting stops before numbers end. A prior is one for all targets [p] or of each [*b, p].
    """

    factor: Float[Tensor, ""] | float
    prior: Float[Tensor, "*#b p"] | None = None


class Reset(NamedTuple):
    """eta' = prior: what was known is gone. A prior is one for all targets [p] or of each [*b, p]."""

    prior: Float[Tensor, "*#b p"]


class LinearMotion(NamedTuple):
    """x' = matrix x + offset + N(0, noise); X' = matrix X matrix^T for covariances."""

    matrix: Float[Tensor, "s s"]
    offset: Float[Tensor, "s"] | None = None
    noise: Float[Tensor, "s s"] | None = None


Dynamics = Discount | Reset | LinearMotion


class Closure(NamedTuple):
    """Whether a map keeps a family, and why, or why not."""

    closed: bool
    why: str


@without_autocast
def is_closed_under(family: ConjugateFamily | Measure, motion: LinearMotion) -> Closure:
    """Whether x' = W x + b + N(0, Q) stays in a family.   [theory 7.6, E49]

    Law: tests/laws/test_closed_maps_keep_their_families.py.

    >>> import torch
    >>> from gradlogz.filters import GammaPoisson
    >>> is_closed_under(GammaPoisson(), LinearMotion(torch.tensor([[2.0]])))
    Closure(closed=True, why='a positive multiple of a Gamma variable is one')
    >>> is_closed_under(GammaPoisson(), LinearMotion(torch.tensor([[1.0]]), torch.tensor([3.0])))
    Closure(closed=False, why='Gamma laws keep their family under positive scaling of each channel alone')
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
            call, "matrix", f"{condition}, got shapes {shapes}", "They act on what the family is a law of."
        )
    if not has_values(W):
        return Closure(True, "not looked at while tracing")
    motion = LinearMotion(*(None if t is None else t.detach() for t in motion))  # type: ignore[arg-type]
    if isinstance(family, Gaussian):
        return _gaussian_measure(family, motion)
    if isinstance(family, Empirical):
        return _key_set(family, motion)
    return RULES.get(type(family), _UNKNOWN)(motion)


def check_dynamics(call: str, family: ConjugateFamily, motion: Dynamics) -> None:
    """Motion keeps the family."""
    if isinstance(motion, Discount):
        factor = motion.factor.detach() if isinstance(motion.factor, Tensor) else motion.factor
        if isinstance(factor, Tensor) and factor.ndim:
            remedy = "Pass one Discount for each mode."
            raise InputValueError(
                call, "discount", f"discount must be one number, got shape {shape_of(factor)}", remedy
            )
        if (not isinstance(factor, Tensor) or has_values(factor)) and not 0 < float(factor) <= 1:
            remedy = "1 forgets nothing; Reset forgets all."
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
            condition = f"the prior of {type(motion).__name__} must have a finite mass"
            remedy = f"Make it with {type(family).__name__}.prior."
            raise InputValueError(call, "prior", f"{condition}, got one outside the domain", remedy)
        return
    found = is_closed_under(family, motion)
    if not found.closed:
        condition = f"LinearMotion must keep the family {type(family).__name__}"
        remedy = "Discount and Reset keep every family; pushforward makes a new one."
        raise InputValueError(call, "LinearMotion", f"{condition}, got one that does not: {found.why}", remedy)


def moved(family: ConjugateFamily, motion: Dynamics, natural: Float[Tensor, "*b g p"]) -> Float[Tensor, "*b g p"]:
    """Natural parameters of histories g after one step of these dynamics."""
    if isinstance(motion, Reset):
        return _of_targets(motion.prior).expand_as(natural)
    if isinstance(motion, Discount):
        if motion.prior is None:
            return family.forgotten(motion.factor, natural)
        return motion.factor * natural + (1 - motion.factor) * _of_targets(motion.prior)
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


def _of_targets(prior: Float[Tensor, "*b p"]) -> Float[Tensor, "*c p"]:
    """One for all histories of a target."""
    return prior if prior.ndim == 1 else prior.unsqueeze(-2)


# The table ---------------------------------------------------------------------------------------------------------


def _dimension(family: Any) -> int:
    """Of what a linear map acts on."""
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
    return Closure(False, "laws of covariances keep their family under X' = W X W^T with W invertible alone")


def _permutation(what: str, *, signs: bool = False) -> Callable[[LinearMotion], Closure]:
    def rule(motion: LinearMotion) -> Closure:
        W, b, Q = motion
        if b is None and Q is None and _permutes(W.abs() if signs else W):
            return Closure(True, "coordinates change places")
        return Closure(False, what)

    return rule


def _reflection(motion: LinearMotion) -> Closure:
    W, b, Q = motion
    diagonal = W.diagonal()
    offset = torch.zeros_like(diagonal) if b is None else b
    same, other = (diagonal == 1) & (offset == 0), (diagonal == -1) & (offset == 1)
    if Q is None and bool((W == torch.diag(diagonal)).all()) and bool((same | other).all()):
        return Closure(True, "1 - x has a Beta law with its parameters exchanged")
    return Closure(False, "Beta laws keep their family under x' = x and x' = 1 - x alone")


def _gaussian_measure(family: Gaussian, motion: LinearMotion) -> Closure:
    W, _, Q = motion
    S = family.covariance(family.loc.detach().unsqueeze(-2) * 0).detach()
    if Q is None and _near(W @ S @ W.mT, S):
        return Closure(True, "W S W^T = S, and tilting moves the mean")
    return Closure(
        False, "with x as the only statistic the covariance cannot change: W S W^T = S is needed, without noise"
    )


def _rotation(motion: LinearMotion) -> Closure:
    W, b, Q = motion
    if b is None and Q is None and _near(W @ W.mT, torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)):
        return Closure(True, "the sphere is turned into itself")
    return Closure(False, "laws on a sphere keep their family under rotations and reflections alone")


def _key_set(family: Empirical, motion: LinearMotion) -> Closure:
    W, b, Q = motion
    x = family.points.detach()
    no = Closure(False, "the points must be mapped onto themselves, with weights changed by exp<b, x> at most")
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
        change = (log_w[alive] - log_w[place]).unsqueeze(-1)  # what the point it goes to had
        affine = torch.cat((family.points.detach()[place], torch.ones_like(x[:, :1])), -1)
        rest = change - affine @ (torch.linalg.pinv(affine) @ change)  # which may be singular, on any device
        if float(rest.abs().max()) > 1e4 * torch.finfo(x.dtype).eps * max(float(change.abs().max()), 1.0):
            return no
    return Closure(True, "the points change places, and tilting makes up for their weights")


def _identity(what: str) -> Callable[[LinearMotion], Closure]:
    def rule(motion: LinearMotion) -> Closure:
        W, b, Q = motion
        plain = b is None and Q is None and bool((W == torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)).all())
        return Closure(True, "nothing moves") if plain else Closure(False, what)

    return rule


_UNKNOWN = _identity("nothing but the identity is known to keep it")
_GAMMA = _positive_scaling(
    "a positive multiple of a Gamma variable is one",
    "Gamma laws keep their family under positive scaling of each channel alone",
)

RULES: dict[type, Callable[[LinearMotion], Closure]] = {
    LinearGaussian: _gaussian_state,
    GammaPoisson: _GAMMA,
    GammaExponential: _GAMMA,
    InverseWishartNormal: _congruence,
    DirichletMultinomial: _permutation("Dirichlet laws keep their family under permutations alone"),
    BetaBinomial: _reflection,
    Gamma: _GAMMA,
    InverseGaussian: _identity("scaling changes the shape parameter, which tilting by x cannot make up for"),
    Wishart: _congruence,
    Sphere: _rotation,
    OneHot: _permutation("laws of categories keep their family under permutations alone"),
    Poisson: _permutation("Poisson laws keep their family under permutations of coordinates alone; thinning is random"),
    Spins: _permutation("laws on the cube keep their family under permutations and changes of sign alone", signs=True),
}
