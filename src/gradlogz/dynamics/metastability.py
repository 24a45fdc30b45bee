"""Clusters that last, and where they will be.

    plateaus        how long a cloud keeps its number of clusters, and whether it still does at the end   [theory 10.4]
    renyi_centers   tokens farther than r from every earlier center: cars that park one after the other
                    under a causal mask tokens gather at them, r = 4 / sqrt(beta)                         [karagodin24]

A cold cloud on the sphere ends as one cluster, but not soon: it rests with several, the longer the colder it is. A
causal mask makes the first of a neighbourhood its center, since it is pulled by none of those that follow.

Read next: observables.py (`clusters`), growth.py (how many there are at first).
"""

from typing import NamedTuple

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Int, Tensor

BLOCK = 1024  # tokens whose distances to all are held at once


class Plateau(NamedTuple):
    """A time in which a cloud keeps its number of clusters.

    start, end: the first time that has the number, and the first one after that has another; the last time of all if
        there is none, and then it is `censored`: it may last longer.
    """

    clusters: int
    start: float
    end: float
    censored: bool

    @property
    def lifetime(self) -> float:
        """At least, if it is censored."""
        return self.end - self.start


def plateaus(
    counts: Int[Tensor, " t"],
    times: Int[Tensor, " t"] | Float[Tensor, " t"],
    *,
    flicker: float = 0.0,
    least: float = 0.0,
) -> list[Plateau]:
    """The plateaus of a series of counts, in their order.

    A run is a stretch of equal counts; it ends when the next one starts. The longest run is taken first, and with it
    every run of the same count that is reached over departures shorter than `flicker`, which belong to it; then the
    longest of the rest. What lasts less than `least` is a transition and is left out.

    Law: tests/laws/test_clusters_last_as_long_as_they_say.py.

    >>> import torch
    >>> counts = torch.tensor([7, 5, 5, 5, 4, 5, 5, 2, 2])
    >>> found = plateaus(counts, 10 * torch.arange(9), flicker=15.0, least=15.0)
    >>> tuple((p.clusters, p.lifetime, p.censored) for p in found)
    ((5, 60.0, False), (2, 10.0, True))
    """
    if counts.ndim != 1 or counts.shape != times.shape or len(counts) == 0 or bool((times.diff() <= 0).any()):
        condition, fact = (
            "counts and times must be [t], and times increase",
            f"{shape_of(counts)} and {shape_of(times)}",
        )
        raise InputValueError(
            "plateaus", "counts", f"{condition}, got {fact}", "Take one cloud of the batch: counts[:, i]."
        )
    firsts = [0, *(counts.diff().nonzero().flatten() + 1).tolist()]
    numbers, at = [int(c) for c in counts[firsts]], times.double().tolist()
    starts = [at[first] for first in firsts]
    ends = [*starts[1:], at[-1]]
    free, found = set(range(len(firsts))), []
    for seed in sorted(free, key=lambda run: starts[run] - ends[run]):
        if seed in free:
            low = _reached(seed, -1, numbers, starts, ends, free, flicker)
            high = _reached(seed, 1, numbers, starts, ends, free, flicker)
            free -= set(range(low, high + 1))
            found.append(Plateau(numbers[seed], starts[low], ends[high], high == len(firsts) - 1))
    return sorted((p for p in found if p.lifetime >= least or p.censored), key=lambda p: p.start)


def _reached(
    run: int, way: int, numbers: list[int], starts: list[float], ends: list[float], free: set[int], flicker: float
) -> int:
    """The last run of the same count that is reached in one direction, over free runs that last less than flicker."""
    at, next_ = run, run + way
    while next_ in free:
        if numbers[next_] == numbers[run]:
            at = next_
        else:
            away = ends[next_] - ends[at] if way > 0 else starts[at] - starts[next_]
            if away >= flicker:
                break
        next_ += way
    return at


def renyi_centers(cloud: Float[Tensor, "*b n d"], *, radius: float, strong: bool = False) -> Bool[Tensor, "*b n"]:
    """Which tokens are Rényi centers: farther than radius from every center before them; the first token is one.

    Their number is that of cars that park one after the other where there is room [renyi58]. Strong centers are farther
    than radius from every token before them, center or not: fewer, and under a causal mask pulled by nobody.

    Costs one distance for each token and center, in linear memory; strong ones one for each pair of tokens.

    Law: tests/theorems/test_causal_tokens_gather_at_renyi_centers.py.

    >>> import torch
    >>> x = torch.tensor([[0.0], [0.9], [1.8], [0.5], [3.0]])
    >>> renyi_centers(x, radius=1.0).tolist(), renyi_centers(x, radius=1.0, strong=True).tolist()
    ([True, False, True, False, True], [True, False, False, False, True])
    """
    check_floats("renyi_centers", cloud=cloud)
    if cloud.ndim < 2 or not radius >= 0:
        condition, fact = "cloud must be [*b, n, d] and radius >= 0", f"shape {shape_of(cloud)} and {radius}"
        raise InputValueError(
            "renyi_centers", "cloud", f"{condition}, got {fact}", "A radius of 4 / sqrt(beta) is the published one."
        )
    lead, (n, d) = cloud.shape[:-2], cloud.shape[-2:]
    x = cloud.reshape(-1, n, d)
    found = _strong(x, radius) if strong else _parked(x, radius)
    return found.reshape(*lead, n)


def _parked(x: Float[Tensor, "b n d"], radius: float) -> Bool[Tensor, "b n"]:
    centers = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    free = torch.ones_like(centers)
    rows = torch.arange(x.shape[0], device=x.device)
    while bool(free.any()):  # the first token that no center covers is the next center, in every cloud at once
        first = free.int().argmax(-1)
        centers[rows, first] |= free[rows, first]
        far = (x - x[rows, first].unsqueeze(1)).square().sum(-1) > radius**2
        free &= far
        free[rows, first] = False
    return centers


def _strong(x: Float[Tensor, "b n d"], radius: float) -> Bool[Tensor, "b n"]:
    n = x.shape[1]
    found = []
    for start in range(0, n, BLOCK):
        rows = torch.arange(start, min(start + BLOCK, n), device=x.device)
        before = torch.arange(n, device=x.device) < rows.unsqueeze(-1)
        near = torch.cdist(x[:, rows], x) <= radius
        found.append(~(near & before).any(-1))
    return torch.cat(found, -1)
