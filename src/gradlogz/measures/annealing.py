"""Particles under tilting: attention as sequential Monte Carlo.

    x_n ~ h                               particles are keys
    w_n = softmax_n <x_n, eta>            their importance weights under P_eta: the attention weights of the query eta
    sum_n w_n x_n                         the estimate of ∇G(eta) from weighted particles: attention to them
    Z(0) / N  sum_n exp<x_n, eta>         unbiased estimate of Z(eta): the exponential of their log normaliser
    1 / sum_n w_n²                        effective sample size: the exponential of Rényi's entropy of order 2 of w
    0 < t_1 < ... < t_K = 1               tilted in steps, resampled and moved at each t eta     [neal01] [delmoral06]

Weighted particles are an `Empirical`: its mass estimates Z, its mean at 0 the mean of P_eta. The chain of gibbs.py
alternately draws one key and a new query; here the query is fixed and there are many keys.

Read next: gibbs.py (the chain), empirical.py (the particles).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Int, Tensor
from .empirical import Empirical
from .measure import Measure, check_measures

Scheme = Literal["systematic", "stratified", "multinomial"]
Move = Callable[[Tensor, Tensor, torch.Generator | None], Tensor]


class Annealed(NamedTuple):
    """Weighted particles of P_eta, the estimate of G(eta), and at each t the effective sample size and the resampling.

    particles.mean(0) estimates the mean of P_eta; particles.log_normalizer(0) is log_normalizer.
    """

    particles: Empirical
    log_normalizer: Float[Tensor, "*b"]
    effective_sample_size: Float[Tensor, "t *b"]
    resampled: Bool[Tensor, "t *b"]


def draw_particles(
    h: Measure, count: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
) -> Empirical:
    """Draws from h with equal weights that sum to its mass: points [*b, *shape, count, d], in `shape` independent sets.

    >>> import torch
    >>> from gradlogz import Gaussian
    >>> h, eta = Gaussian(torch.zeros(2), torch.eye(2)), torch.tensor([0.5, 0.0])
    >>> keys = draw_particles(h, 100_000, generator=torch.Generator().manual_seed(0))
    >>> bool((keys.log_normalizer(eta) - h.log_normalizer(eta)).abs() < 0.01)  # an importance estimate of G
    True
    """
    check_measures("draw_particles", h=h)
    if count < 1:
        raise InputValueError(
            "draw_particles", "count", f"count must be at least 1, got {count}", "Pass the number of particles."
        )
    here = h._reference()
    zero = torch.zeros(*h.batch_shape, *shape, h.dim) if here is None else here.new_zeros(*h.batch_shape, *shape, h.dim)
    points = h.sample(zero, (count,), generator=generator).movedim(0, -2)
    return Empirical(points, (h.log_normalizer(zero) - math.log(count)).unsqueeze(-1).expand(points.shape[:-1]))


def anneal(
    start: Empirical,
    eta: Float[Tensor, "*b d"],
    *,
    move: Move | None = None,
    schedule: int | Sequence[float] = 10,
    scheme: Scheme = "systematic",
    threshold: float = 0.5,
    generator: torch.Generator | None = None,
) -> Annealed:
    """Move particles from h to P_eta in steps; the estimate of Z(eta) is unbiased if they are draws from h.

    At each t of the schedule the weights are multiplied by exp(dt <x, eta>). If the effective sample size is below
    `threshold` times the number of particles, they are resampled by their weights. Then each is moved by a kernel that
    leaves P_(t eta) invariant. Without moves the result is the importance estimate of a single step.

    Args:
        start: particles from `draw_particles(h, count)`; or all points of an `Empirical`, for an exact result.
        eta: one query for each set of particles.
        move: function of particles [*b, n, d], t eta [*b, d] and a generator, such as `gibbs_move`,
            `metropolis_move` or `random_walk_move`.
        schedule: times that increase to 1, or a number of equal steps.
        threshold: 0 never resamples, 1 nearly always.

    Law: tests/laws/test_particles_weigh_as_attention.py.

    >>> import torch
    >>> from gradlogz import Gaussian
    >>> h, eta = Gaussian(torch.zeros(2), torch.eye(2)), torch.tensor([3.0, 0.0])
    >>> keys = draw_particles(h, 5000, generator=torch.Generator().manual_seed(0))
    >>> moved = anneal(keys, eta, move=gibbs_move(h), generator=torch.Generator().manual_seed(1))
    >>> bool((moved.log_normalizer - h.log_normalizer(eta)).abs() < 0.1)
    True
    """
    times = _times(schedule)
    _check(start, eta, threshold)
    n = start.points.shape[-2]
    x = start.points.expand(*start.batch_shape, n, start.dim)
    log_w = x.new_zeros(()) if start.log_weights is None else start.log_weights
    log_w = log_w.expand(x.shape[:-1])
    sizes, turns, before = [], [], 0.0
    for t in times:
        # Weighing ---------------------------------------------------------------------------------------------------
        log_w = log_w + (t - before) * (x @ eta.unsqueeze(-1)).squeeze(-1)
        before = t
        # Resampling -------------------------------------------------------------------------------------------------
        size = effective_sample_size(log_w)
        due = size < threshold * n
        index = resample_ancestors(log_w, scheme=scheme, generator=generator)
        drawn = x.gather(-2, index.unsqueeze(-1).expand(x.shape))
        x = torch.where(due[..., None, None], drawn, x)
        equal = (log_w.logsumexp(-1, keepdim=True) - math.log(n)).expand(log_w.shape)
        log_w = torch.where(due.unsqueeze(-1), equal, log_w)
        # Moving -----------------------------------------------------------------------------------------------------
        x = x if move is None else _moved(move, x, t * eta, generator)
        sizes.append(size)
        turns.append(due)
    return Annealed(Empirical(x, log_w), log_w.logsumexp(-1), torch.stack(sizes), torch.stack(turns))


def effective_sample_size(log_weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Effective sample size 1 / sum_n w_n² of normalised weights, from 1 to n: exp of Rényi's entropy of order 2.

    For attention weights it is the effective number of keys of a query, at most exp of their Shannon entropy.
    """
    check_floats("effective_sample_size", log_weights=log_weights)
    return (2 * log_weights.logsumexp(-1) - (2 * log_weights).logsumexp(-1)).exp()


def resample_ancestors(
    log_weights: Float[Tensor, "*b n"],
    count: int | None = None,
    *,
    scheme: Scheme = "systematic",
    generator: torch.Generator | None = None,
) -> Int[Tensor, "*b k"]:
    """Indices of resampled particles, unbiased: particle n occurs count w_n times on average.

    "multinomial" draws independently; "stratified" draws one in each of count equal parts of the weights; "systematic"
    uses the same position in each part, so that a particle occurs floor or ceil of count w_n times.   [douc05]
    """
    check_floats("resample_ancestors", log_weights=log_weights)
    n = log_weights.shape[-1]
    k = n if count is None else count
    if scheme not in ("systematic", "stratified", "multinomial"):
        condition = 'scheme must be "systematic", "stratified" or "multinomial"'
        raise InputValueError(
            "resample_ancestors", "scheme", f"{condition}, got {scheme!r}", "Choose systematic for the least variance."
        )
    total = log_weights.detach().double().softmax(-1).cumsum(-1)
    total = total / total[..., -1:]
    width = 1 if scheme == "systematic" else k
    u = torch.rand(*total.shape[:-1], width, generator=generator, dtype=torch.float64, device=total.device)
    if scheme != "multinomial":
        u = (torch.arange(k, device=u.device) + u) / k
    # Below 1, the end of the last positive weight: particles without weight are never drawn.
    index = torch.searchsorted(total.contiguous(), u.clamp(max=1 - 2**-53).contiguous(), right=True)
    return index.clamp(max=n - 1)  # where no particle has weight, any index is right


def gibbs_move(h: Measure) -> Move:
    """Move: replace every particle by a draw from P_(t eta), for measures that can be sampled."""
    check_measures("gibbs_move", h=h)
    return lambda x, eta, generator: h.sample(eta.unsqueeze(-2).expand(x.shape), generator=generator)


def metropolis_move(h: Measure) -> Move:
    """Move: replace a particle by a draw y from h with probability min(1, exp<y - x, t eta>); needs only such draws."""
    check_measures("metropolis_move", h=h)

    def move(x: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
        y = h.sample(torch.zeros_like(x), generator=generator)
        return _accepted(x, y, ((y - x) @ eta.unsqueeze(-1)).squeeze(-1), generator)

    return move


def random_walk_move(log_density: Callable[[Tensor], Tensor], size: float) -> Move:
    """Move: a random walk with steps N(0, size² I), accepted by Metropolis; needs the density of h up to a factor.

    Args:
        log_density: log density of h with respect to Lebesgue measure, a function from [..., d] to [...].
    """

    def move(x: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
        y = x + size * torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        rise = log_density(y) - log_density(x) + ((y - x) @ eta.unsqueeze(-1)).squeeze(-1)
        return _accepted(x, y, rise, generator)

    return move


def _accepted(x: Tensor, y: Tensor, rise: Tensor, generator: torch.Generator | None) -> Tensor:
    u = torch.rand(rise.shape, generator=generator, dtype=rise.dtype, device=rise.device)
    return torch.where((u < rise.exp()).unsqueeze(-1), y, x)


def _moved(move: Move, x: Tensor, eta: Tensor, generator: torch.Generator | None) -> Tensor:
    y = move(x, eta, generator)
    if y.shape != x.shape:
        condition, remedy = f"move must keep the shape {shape_of(x)}", "Return one particle for each particle."
        raise InputValueError("anneal", "move", f"{condition}, got shape {shape_of(y)}", remedy)
    return y


def _times(schedule: int | Sequence[float]) -> list[float]:
    steps = range(1, schedule + 1) if isinstance(schedule, int) else ()
    times = [k / len(steps) for k in steps] if isinstance(schedule, int) else [float(t) for t in schedule]
    rising = all(a < b for a, b in zip([0.0, *times], times, strict=False))
    if not times or not rising or times[-1] != 1.0:
        condition = "schedule must be a positive number of steps, or positive times that increase to 1"
        remedy = "End with time 1, which is eta itself."
        raise InputValueError("anneal", "schedule", f"{condition}, got {len(times)} times", remedy)
    return times


def _check(start: Empirical, eta: Tensor, threshold: float) -> None:
    if not isinstance(start, Empirical) or (
        start.log_weights is not None and start.log_weights.ndim >= start.points.ndim
    ):
        remedy = "Draw them with draw_particles(h, count)."
        fact = type(start).__name__ if not isinstance(start, Empirical) else "one with weights per query"
        raise InputTypeError("anneal", "start", f"start must be an Empirical of particles, got {fact}", remedy)
    check_floats("anneal", start=start.points, eta=eta)
    wanted = (*start.batch_shape, start.dim)
    if shape_of(eta) != wanted:
        condition, remedy = f"eta must have shape {wanted}", "Pass one query for each set of particles."
        raise InputValueError("anneal", "eta", f"{condition}, got shape {shape_of(eta)}", remedy)
    if not 0 <= threshold <= 1:
        remedy = "Pass a fraction of the number of particles."
        raise InputValueError("anneal", "threshold", f"threshold must be in [0, 1], got {threshold}", remedy)
