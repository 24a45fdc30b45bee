"""Many simulations on a grid of parameters: a phase diagram.

    sweep("beta=0.1:4:12,tau=-0.5:1:8")     each place of the grid ends as one verdict         -> Phases

beta and tau are batched within one call of evolve; dimensions, numbers of tokens and contractions take turns; batches
are spread over processes. What is done when it is interrupted is kept.

Read next: theory_boundaries.py (what theory says of the grid), phases.py (the page).
"""

import itertools
import math
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._errors import InputValueError, sentence
from ..dynamics.evolution import evolve
from .presets import preset_of
from .run_simulation import placement_of
from .settings import Settings, ascent_of, changed, check, flags, starts

WHOLE = ("dim", "tokens", "heads")
NUMBERS = ("beta", "tau")
SWEPT = (*NUMBERS, *WHOLE, "contraction")
BATCH = 1 << 21  # numbers of clouds that are evolved in one call
EXAMPLE = '"beta=0.1:4:12,tau=-0.5:1:8" or "contraction=zca|rms_norm"'


class Range(NamedTuple):
    """One axis of the grid."""

    name: str
    values: tuple[Any, ...]


class Place(NamedTuple):
    """How the clouds of one place of the grid ended.

    share: of the clouds that ended as most did.
    evidence: medians over these.
    """

    kind: str
    share: float
    evidence: dict[str, float]


@dataclass(frozen=True)
class Phases:
    """A phase diagram: axes, and what was found at each place of the grid, None where it was not reached."""

    settings: Settings
    ranges: tuple[Range, ...]
    places: dict[tuple[int, ...], Place]
    text: str
    preset: str | None = None

    @property
    def command(self) -> str:
        """The command line that makes the same page again."""
        name = [] if self.preset is None else [self.preset]
        words = flags(self.settings, _base(self.preset))
        return " ".join(["gradlogz simulate", *name, f'--sweep "{self.text}"', *words])

    @property
    def complete(self) -> bool:
        """Whether every place of the grid was reached."""
        return len(self.places) == math.prod(len(r.values) for r in self.ranges)

    def page(self) -> str:
        """All of it as one HTML page. Needs the extra [report]."""
        from .phases import page_of
        from .reporting import rendered

        return rendered(page_of(self))

    def save(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        from ..page import write

        return write(path, self.page())


def sweep(
    text: str,
    *,
    preset: str | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Phases:
    """Simulate every place of a grid, on all cores.

    Args:
        text: one or two axes, name=from:to:count or name=one|other, of beta, tau, dim, tokens, heads, contraction.
        preset: whose settings are used where the grid says nothing; otherwise 200 Gaussian tokens, 300 steps, one seed.
        processes: as many as there are cores by default; 1 stays in this process.
        progress: called with the number of places done, and of all.
        options: of `Settings`, as in `simulate`.

    >>> found = sweep("tau=-0.2|0.5", processes=1, dim=1, beta=0.5, tokens=150)
    >>> [found.places[i,].kind for i in (0, 1)]
    ['gaussian', 'clusters']
    """
    settings = changed(_base(preset), options)
    ranges = ranges_of(text)
    grid = list(itertools.product(*(range(len(r.values)) for r in ranges)))
    for place in grid:
        check(_at(settings, ranges, place))
    work = list(_batches(settings, ranges, grid))
    places: dict[tuple[int, ...], Place] = {}
    workers = min(processes or os.cpu_count() or 1, len(work))
    try:
        for found in _done(work, workers):
            places |= found
            if progress is not None:
                progress(len(places), len(grid))
    except KeyboardInterrupt:
        pass  # what is done is shown
    return Phases(settings, ranges, places, text, preset)


def _base(preset: str | None) -> Settings:
    return Settings(tokens=200, steps=300, seeds=1) if preset is None else preset_of(preset).settings


def ranges_of(text: str) -> tuple[Range, ...]:
    """The axes that a text names."""
    found = []
    for part in text.split(","):
        name, _, values = part.strip().partition("=")
        if name not in SWEPT or not values:
            condition, fact = f"an axis must be one of {', '.join(SWEPT)} with its values", f"{part.strip()!r}"
            raise InputValueError(sentence("sweep", condition, fact, f"Write {EXAMPLE}."))
        read = _values(name, values)
        if not read:
            condition = "values must be from:to:count or one|other, and numbers but for contraction"
            raise InputValueError(sentence("sweep", condition, f"{values!r}", f"Write {EXAMPLE}."))
        found.append(Range(name, read))
    if len(found) > 2 or len({r.name for r in found}) < len(found):
        condition, fact = "there must be one or two different axes", ", ".join(r.name for r in found)
        raise InputValueError(sentence("sweep", condition, fact, "Fix the others by their options."))
    return tuple(found)


def _values(name: str, text: str) -> tuple[Any, ...]:
    """The values of an axis; none if they cannot be read."""
    if name == "contraction":
        return tuple(text.split("|"))
    try:
        if ":" in text:
            low, high, count = text.split(":")
            numbers = torch.linspace(float(low), float(high), int(count), dtype=torch.float64).tolist()
        else:
            numbers = [float(word) for word in text.split("|")]
    except ValueError:  # not numbers, or not three of them
        return ()
    if not all(map(math.isfinite, numbers)):
        return ()
    if name in WHOLE:
        return tuple(dict.fromkeys(round(number) for number in numbers))
    return tuple(float(f"{number:.6g}") for number in numbers)


def _at(settings: Settings, ranges: tuple[Range, ...], place: tuple[int, ...]) -> Settings:
    return replace(settings, **{r.name: r.values[i] for r, i in zip(ranges, place, strict=True)})


Batch = tuple[Settings, list[tuple[tuple[int, ...], float, float]]]


def _batches(settings: Settings, ranges: tuple[Range, ...], grid: list[tuple[int, ...]]) -> Iterator[Batch]:
    """Places that differ in beta and tau alone, as many as one call takes."""
    alike: dict[Settings, list[tuple[tuple[int, ...], float, float]]] = {}
    for place in grid:
        at = _at(settings, ranges, place)
        alike.setdefault(replace(at, beta=1.0, tau=1.0), []).append((place, at.beta, at.tau))
    for common, places in alike.items():
        pairs = common.seeds * common.tokens * max(common.keys, common.tokens)
        size = max(1, min(BATCH // pairs, math.ceil(len(places) / (os.cpu_count() or 1))))
        for first in range(0, len(places), size):
            yield common, places[first : first + size]


def _done(work: list[Batch], workers: int) -> Iterator[dict[tuple[int, ...], Place]]:
    if workers <= 1:
        yield from map(run_batch, work)
        return
    with multiprocessing.get_context("spawn").Pool(workers, _quiet) as pool:
        yield from pool.imap_unordered(run_batch, work)


def _quiet() -> None:
    """A worker leaves interrupts to the process that started it, and has one core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def run_batch(batch: Batch) -> dict[tuple[int, ...], Place]:
    """The places of one batch; one by one if a contraction refuses the clouds of some."""
    settings, places = batch
    try:
        verdicts = _evolved(settings, places)
    except ValueError as refusal:
        if len(places) == 1:
            return {places[0][0]: Place("undefined", 1.0, {"reason": str(refusal)})}  # type: ignore[dict-item]
        return {k: v for one in places for k, v in run_batch((settings, [one])).items()}
    found = {}
    for i, (place, _, _) in enumerate(places):
        mine = verdicts[i * settings.seeds : (i + 1) * settings.seeds]
        kind, count = Counter(v.kind for v in mine).most_common(1)[0]
        evidence = [v.evidence for v in mine if v.kind == kind]
        middle = {name: float(torch.tensor([e[name] for e in evidence]).median()) for name in evidence[0]}
        found[place] = Place(kind, count / settings.seeds, middle)
    return found


def _evolved(settings: Settings, places: list[tuple[tuple[int, ...], float, float]]) -> list[Any]:
    shape = (len(places), settings.seeds)
    beta, tau = (torch.tensor([p[i] for p in places], dtype=torch.float64)[:, None].expand(shape) for i in (1, 2))
    ascent = replace(ascent_of(settings), beta=beta, tau=tau)
    cloud = starts(settings).expand(*shape, settings.tokens, settings.dim)
    where = placement_of(settings.placement)
    return evolve(cloud, ascent, contraction=settings.given, steps=settings.steps, placement=where).verdicts
