"""Metastable clusters: how long they last, and where they form under a causal mask.

    plateaus        periods of constant cluster count                                                     [theory 10.4]
    renyi_centers   tokens farther than r from every earlier center; under a causal mask tokens gather
                    at the centers of r = 4 / sqrt(beta)                                                  [karagodin24]

At large beta a cloud on the sphere keeps several clusters for a long time before it becomes one; the time grows with
beta. Under a causal mask the first token of a neighbourhood becomes its center, since later tokens do not attract it.

Read next: observables.py (`clusters`), growth.py (`fastest_degree`, the initial cluster count).
"""

import math
from typing import NamedTuple

import torch

from .._errors import InputValueError, check_floats, shape_of
from .._typing import Bool, Float, Int, Tensor

BLOCK = 1024  # tokens whose distances to all others are held at once


class Plateau(NamedTuple):
    """A period of constant cluster count.

    Attributes:
        start, end: the first time with this count, and the first later time with another count. If there is none, `end`
            is the last time of the series and the plateau is `censored`: it may last longer.
    """

    clusters: int
    start: float
    end: float
    censored: bool

    @property
    def lifetime(self) -> float:
        """Duration; a lower bound if the plateau is censored."""
        return self.end - self.start


def plateaus(
    counts: Int[Tensor, " t"],
    times: Int[Tensor, " t"] | Float[Tensor, " t"],
    *,
    flicker: float = 0.0,
    least: float = 0.0,
) -> list[Plateau]:
    """Plateaus of a series of cluster counts, in order of time.

    The longest run of equal counts is the first plateau. It absorbs neighbouring runs of the same count if the
    interruption between them is shorter than `flicker`. The longest remaining run is the next plateau, and so on.
    Plateaus shorter than `least` are dropped, except a censored one.

    Law: tests/laws/test_clusters_last_as_long_as_they_say.py.

    >>> import torch
    >>> counts = torch.tensor([7, 5, 5, 5, 4, 5, 5, 2, 2])
    >>> periods = plateaus(counts, 10 * torch.arange(9), flicker=15.0, least=15.0)
    >>> tuple((p.clusters, p.lifetime, p.censored) for p in periods)
    ((5, 60.0, False), (2, 10.0, True))
    """
    if counts.ndim != 1 or counts.shape != times.shape or len(counts) == 0 or bool((times.diff() <= 0).any()):
        condition = "counts and times must be [t] with t > 0, and times must increase"
        fact = f"shapes {shape_of(counts)} and {shape_of(times)}"
        raise InputValueError(
            "plateaus", "counts", f"{condition}, got {fact}", "Pass one cloud of the batch, counts[:, i]."
        )
    firsts = [0, *(counts.diff().nonzero().flatten() + 1).tolist()]
    numbers, moments = [int(c) for c in counts[firsts]], times.double().tolist()
    starts = [moments[first] for first in firsts]
    ends = [*starts[1:], moments[-1]]
    free, periods = set(range(len(firsts))), []
    for seed in sorted(free, key=lambda run: starts[run] - ends[run]):
        if seed in free:
            low = _reached(seed, -1, numbers, starts, ends, free, flicker)
            high = _reached(seed, 1, numbers, starts, ends, free, flicker)
            free -= set(range(low, high + 1))
            periods.append(Plateau(numbers[seed], starts[low], ends[high], high == len(firsts) - 1))
    return sorted((p for p in periods if p.lifetime >= least or p.censored), key=lambda p: p.start)


def _reached(
    run: int, direction: int, numbers: list[int], starts: list[float], ends: list[float], free: set[int], flicker: float
) -> int:
    """The farthest free run of the same count in one direction, across interruptions shorter than flicker."""
    last, next_ = run, run + direction
    while next_ in free:
        if numbers[next_] == numbers[run]:
            last = next_
        else:
            interruption = ends[next_] - ends[last] if direction > 0 else starts[last] - starts[next_]
            if interruption >= flicker:
                break
        next_ += direction
    return last


def renyi_centers(cloud: Float[Tensor, "*b n d"], *, radius: float, strong: bool = False) -> Bool[Tensor, "*b n"]:
    """Mask of the Rényi centers, [*b, n]: tokens farther than radius from every earlier center; the first is one.

    The number of centers is that of Rényi's parking problem [renyi58]. Strong centers are farther than radius from
    every earlier token, center or not; they are fewer, and under a causal mask no other token attracts them.

    Cost: one distance for each token and center, in linear memory; for strong centers one for each pair of tokens.

    Law: tests/theorems/test_causal_tokens_gather_at_renyi_centers.py.

    >>> import torch
    >>> x = torch.tensor([[0.0], [0.9], [1.8], [0.5], [3.0]])
    >>> renyi_centers(x, radius=1.0).tolist(), renyi_centers(x, radius=1.0, strong=True).tolist()
    ([True, False, True, False, True], [True, False, False, False, True])
    """
    check_floats("renyi_centers", cloud=cloud)
    if cloud.ndim < 2 or not radius >= 0:
        condition, fact = "cloud must be [*b, n, d] and radius >= 0", f"shape {shape_of(cloud)} and radius={radius}"
        raise InputValueError(
            "renyi_centers", "cloud", f"{condition}, got {fact}", "Pass the published radius, 4 / sqrt(beta)."
        )
    lead, (n, d) = cloud.shape[:-2], cloud.shape[-2:]
    x = cloud.reshape(math.prod(lead), n, d)
    centers = _strong_centers(x, radius) if strong else _parked_centers(x, radius)
    return centers.reshape(*lead, n)


def _parked_centers(x: Float[Tensor, "b n d"], radius: float) -> Bool[Tensor, "b n"]:
    centers = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    free = torch.ones_like(centers)
    rows = torch.arange(x.shape[0], device=x.device)
    while bool(free.any()):  # the first token that no center covers becomes a center, in all clouds at once
        first = free.int().argmax(-1)
        centers[rows, first] |= free[rows, first]
        far = (x - x[rows, first].unsqueeze(1)).square().sum(-1) > radius**2
        free &= far
        free[rows, first] = False
    return centers


def _strong_centers(x: Float[Tensor, "b n d"], radius: float) -> Bool[Tensor, "b n"]:
    n = x.shape[1]
    blocks = []
    for start in range(0, n, BLOCK):
        rows = torch.arange(start, min(start + BLOCK, n), device=x.device)
        before = torch.arange(n, device=x.device) < rows.unsqueeze(-1)
        near = torch.cdist(x[:, rows], x) <= radius
        blocks.append(~(near & before).any(-1))
    return torch.cat(blocks, -1)
