"""Growth factors of small deviations from equilibrium in one step of attention and normalisation.

    hermite_growth   1 + n s (beta c)^(n-1),  s = tau / (1 + tau beta c)                    Gaussian cloud  [theory 4.4]
    sphere_growth    1 + tau / (1 + tau a) · I_{l+D/2-1}(beta) / I_{D/2-1}(beta) · l (l+D-2) / beta
                     a = I_{D/2}(beta) / I_{D/2-1}(beta)                                   uniform sphere  [theory 4.5]
    fastest_degree   the degree l of the largest factor, near sqrt(2 beta) for beta much above D           [theory 4.5]
    escape_time      log sqrt(n / 6) / log gamma_3                     whitened Gaussian sample of n tokens [theory 4.4]
    self_weight      sigmoid(beta r² - beta² r² c / 2 - log n)                           finite n       [theory 10.3]

A factor above 1 is growth. For tau > 0 every mode grows, so the Gaussian is unstable under every normalisation: each
removes only some modes of order 1 and 2. For tau < 0 modes shrink.

Read next: mode_amplitudes.py (the deviations measured on tokens), gaussian_cloud.py, evolution.py.
"""

import math
from collections.abc import Iterable

import torch

from .._errors import InputValueError
from .._typing import Float, Tensor
from ..special.bessel import bessel_ratio, log_bessel


def hermite_growth(
    order: int | tuple[int, ...], *, variance: float | Float[Tensor, " d"], beta: float, tau: float
) -> float:
    """Growth factor of Hermite mode n of a Gaussian cloud in one step that ends by restoring its moments.

        gamma_n     = 1 + n s (beta c)^(n-1)                                          variance c in all directions
        gamma_alpha = 1 + sum_a alpha_a s_a prod_b (beta c_b)^(alpha_b - [a = b])     variances c_a, multi-index

    Infinite if 1 + tau beta c = 0: the step maps the cloud to a point, and nothing restores its moments.

    Law: tests/theorems/test_theory_4_4_hermite_modes_grow.py.
    """
    alpha = (order,) if isinstance(order, int) else tuple(order)
    c = [float(variance)] * len(alpha) if not isinstance(variance, Tensor) else variance.double().tolist()
    if min(alpha) < 0 or sum(alpha) == 0 or len(c) != len(alpha):
        condition = "order must be a positive integer, or a tuple with one integer >= 0 for each variance"
        remedy = "Pass 3 for the skewness, 4 for the kurtosis."
        raise InputValueError("hermite_growth", "order", f"{condition}, got {order!r} and {len(c)} variances", remedy)
    total = 1.0
    for a, count in enumerate(alpha):
        if count and 1 + tau * beta * c[a] == 0:
            return math.inf
        if count:
            others = math.prod((beta * c[b]) ** (alpha[b] - (a == b)) for b in range(len(alpha)))
            total += count * tau / (1 + tau * beta * c[a]) * others
    return total


def sphere_growth(degree: int, *, dim: int, beta: float, tau: float, radius: float = 1.0) -> float:
    """Growth factor of the spherical harmonics of one degree in one step, around the uniform distribution.

    Law: tests/theorems/test_theory_4_5_harmonics_grow_on_the_sphere.py.
    """
    if degree < 1 or dim < 2 or not beta > 0:
        condition, fact = "degree must be >= 1, dim >= 2 and beta > 0", f"degree={degree}, dim={dim} and beta={beta}"
        raise InputValueError(
            "sphere_growth", "degree", f"{condition}, got {fact}", "Degree 0 is the mass, which does not change."
        )
    x = torch.tensor(beta * radius**2, dtype=torch.float64)
    a = float(bessel_ratio(dim / 2 - 1, x))
    ratio = float((log_bessel(degree + dim / 2 - 1, x) - log_bessel(dim / 2 - 1, x)).exp())
    return 1 + tau / (1 + tau * a) * ratio * degree * (degree + dim - 2) / float(x)


def hermite_curves(
    orders: Iterable[int], betas: Iterable[float], *, tau: float, variance: float = 1.0
) -> Float[Tensor, "k s"]:
    """`hermite_growth` for each order and inverse temperature, [orders, betas].

    >>> hermite_curves([3, 4], [0.0, 1.0], tau=1.0).tolist()
    [[1.0, 2.5], [1.0, 3.0]]
    """
    betas = list(betas)
    rows = [[hermite_growth(n, variance=variance, beta=b, tau=tau) for b in betas] for n in orders]
    return torch.tensor(rows, dtype=torch.float64)


def sphere_curves(
    degrees: Iterable[int], betas: Iterable[float], *, dim: int, tau: float, radius: float = 1.0
) -> Float[Tensor, "k s"]:
    """`sphere_growth` for each degree and inverse temperature, [degrees, betas].

    >>> (sphere_curves(range(1, 9), [5.0, 20.0], dim=2, tau=0.5).argmax(0) + 1).tolist()
    [3, 6]
    """
    betas = list(betas)
    rows = [[sphere_growth(n, dim=dim, beta=b, tau=tau, radius=radius) for b in betas] for n in degrees]
    return torch.tensor(rows, dtype=torch.float64)


def fastest_degree(*, dim: int, beta: float, radius: float = 1.0) -> int:
    """Degree of the fastest-growing harmonics around the uniform distribution on the sphere, for any step size.

    On the circle this is the cluster count that appears first. The factor has a single maximum over degrees, so the
    search stops when the factor falls.

    >>> tuple(fastest_degree(dim=2, beta=beta) for beta in (1.0, 5.0, 20.0, 80.0))
    (1, 3, 6, 13)
    """
    degree, factor = 1, sphere_growth(1, dim=dim, beta=beta, tau=1.0, radius=radius)
    while (following := sphere_growth(degree + 1, dim=dim, beta=beta, tau=1.0, radius=radius)) > factor:
        degree, factor = degree + 1, following
    return degree


def escape_time(n: int | float, *, beta: float, tau: float, variance: float = 1.0) -> float:
    """Number of steps until the skewness of a whitened Gaussian cloud of n tokens has grown from 6 / n to 1.

        t = log sqrt(n / 6) / log gamma_3                                                                [theory 4.4]

    The third moment of a sample has size sqrt(6 / n) and grows by gamma_3, the lowest mode that whitening leaves. For a
    cloud whose `skewness` is known, pass n = 6 / skewness. Infinite for tau <= 0, where the cloud stays Gaussian.

    Law: tests/theorems/test_theory_4_4_clouds_escape_in_time.py.
    """
    if not n > 0 or not beta * variance > 0:
        condition, fact = "n, beta and variance must be positive", f"n={n}, beta={beta} and variance={variance}"
        remedy = "Pass the number of tokens, or 6 / skewness."
        raise InputValueError("escape_time", "n", f"{condition}, got {fact}", remedy)
    growth = hermite_growth(3, variance=variance, beta=beta, tau=tau)
    return math.inf if growth <= 1 else max(0.0, math.log(n / 6) / 2 / math.log(growth))


def self_weight(*, beta: float, squared_radius: float, variance: float, n: int) -> float:
    """Attention weight of a token on itself among n tokens, if the others are Gaussian of this variance.

    Above 1/2 the cloud is frozen, and the theory of infinitely many tokens no longer describes it.
    """
    logit = beta * squared_radius - beta**2 * squared_radius * variance / 2 - math.log(n)
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def critical_beta(n: int, dim: int) -> float:
    """Inverse temperature at which tokens on the sphere of radius sqrt(dim) have weight 1/2 on themselves.

    beta* = 1 - sqrt(1 - 2 log n / dim)                 infinite if dim < 2 log n
    """
    if n < 1 or dim < 1:
        remedy = "Pass the number of tokens and of dimensions."
        raise InputValueError("critical_beta", "n", f"n and dim must be positive, got n={n} and dim={dim}", remedy)
    inside = 1 - 2 * math.log(n) / dim
    return math.inf if inside < 0 else 1 - math.sqrt(inside)
