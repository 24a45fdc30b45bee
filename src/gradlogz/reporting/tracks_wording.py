"""What was found, in sentences.

Read next: tracks_page.py, which puts them on a page; tracks_terminal.py, which prints them.
"""

from ..page.parts import Status
from ..tracking.records import Share, Tracks

LEVEL = 0.95  # of the band
APART = 0.02  # that a share may be off and the filter still be what it claims, for practical purposes


def counted(number: int, word: str) -> str:
    """A number with its noun."""
    return f"{number:,} {word}{'' if number == 1 else 's'}".replace(",", "\u202f")


def consistent(share: Share) -> Status:
    """Whether as many detections lie in the band as should: 95 % is in the interval, or near the share."""
    if share.total == 0:
        return "silent"
    return "agrees" if share.low <= LEVEL <= share.high or abs(share.value - LEVEL) <= APART else "departs"


def headline(tracks: Tracks) -> str:
    """How many targets and detections, and whether the filter is what it claims."""
    found, share = tracks.detections, tracks.consistency
    seen = int((~found.position.isnan()).any(-1).sum())
    who = f"{counted(len(found.names), 'target')}, {counted(seen, 'detection')}"
    if share.total == 0:
        return f"{who}: no detection follows another of its target, so that nothing can be compared."
    inside = f"{share.value:.1%} of the innovations lie in their 95\u00a0% band"
    interval = f"{share.low:.1%} to {share.high:.1%}"
    return f"{who}: {inside} ({interval}), {_meaning(tracks)}."


def _meaning(tracks: Tracks) -> str:
    share = tracks.consistency
    if consistent(share) == "agrees":
        return "as those of a filter that knows its noise do"
    above = int((tracks.nis > tracks.nis_high).sum()) / share.total
    below = int((tracks.nis < tracks.nis_low).sum()) / share.total
    if share.value > LEVEL:
        return "more than should: the filter is less sure than it could be"
    return "too few: the filter is too sure of itself" if above > below else "too few: the filter is too unsure"


def skipped(tracks: Tracks) -> str:
    """How many rows were left out, and what was wrong with the first of them."""
    bad = tracks.detections.bad
    if not bad:
        return ""
    first = bad[0]
    return f"{counted(len(bad), 'bad row')} left out; the first: {first.condition}; got {first.fact}."


def beside_truth(tracks: Tracks) -> str:
    """Errors of the scenario."""
    e = tracks.errors
    if not e:
        return ""
    words = [f"detections {e['error of detections']:.0f}\u00a0m"]
    for name in ("filtered", "smoothed"):
        if f"{name} position" in e:
            words.append(f"{name} {e[f'{name} position']:.0f}\u00a0m and {e[f'{name} velocity']:.1f}\u00a0m/s")
    nees = ", ".join(f"{e[f'{n} NEES']:.2f} {n}" for n in ("filtered", "smoothed") if f"{n} NEES" in e)
    return (
        f"Root mean square errors beside the truth: {', '.join(words)}. NEES a degree of freedom (1 is right): {nees}."
    )
