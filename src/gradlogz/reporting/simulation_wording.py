"""What was seen, in sentences.

Read next: simulation_page.py, which puts them on a page; simulation_terminal.py, which prints them.
"""

from collections import Counter

from ..page.parts import Status
from ..simulation.records import Simulation

KINDS = {  # how a cloud ends, and the colour that says so
    "gaussian": "blue",
    "clusters": "sky",
    "collapsed": "purple",
    "frozen": "yellow",
    "blow-up": "ink",
    "other": "soft",
}
PHRASES = {
    "gaussian": "cannot be told from a Gaussian cloud of the same size",
    "collapsed": "has collapsed to one cluster",
    "clusters": "is made of clusters",
    "frozen": "is frozen: tokens attend to themselves",
    "blow-up": "has left the finite numbers",
    "other": "is none of these: not Gaussian, not clustered, not frozen",
}
PLURAL = {
    "gaussian": "cannot be told from Gaussian clouds of the same size",
    "collapsed": "have collapsed to one cluster each",
    "clusters": "are made of clusters",
    "frozen": "are frozen: tokens attend to themselves",
    "blow-up": "have left the finite numbers",
    "other": "are neither Gaussian nor clustered nor frozen",
}


def verdict_sentence(simulation: Simulation) -> str:
    """What has become of the clouds, with the numbers that say so."""
    kinds = Counter(v.kind for v in simulation.verdicts)
    total = len(simulation.verdicts)
    made = simulation.trajectory.step
    steps = f"After {made} step{'' if made == 1 else 's'}"
    if total == 1:
        return f"{steps} the cloud {PHRASES[simulation.verdict.kind]}{_numbers(simulation, simulation.verdict.kind)}."
    parts = []
    for kind, count in kinds.most_common():
        who = f"all {total} clouds" if count == total else f"{count} of {total} clouds"
        parts.append(f"{who} {(PLURAL if count > 1 else PHRASES)[kind]}{_numbers(simulation, kind)}")
    return f"{steps} {', and '.join(parts)}."


def _numbers(simulation: Simulation, kind: str) -> str:
    found = [v.evidence for v in simulation.verdicts if v.kind == kind]
    if kind == "clusters":
        return f" ({_range([e['clusters'] for e in found], '.0f')} of them)"
    if kind == "frozen":
        return f" (with weight {_range([e['self_weight'] for e in found], '.2f')})"
    if kind == "blow-up":
        return f" (in step {_range([e['step'] for e in found], '.0f')})"
    if kind in ("gaussian", "other"):
        usual = max(e["sliced_wasserstein_null"] for e in found)
        distance = _range([e["sliced_wasserstein"] for e in found], ".3f")
        return f" (sliced Wasserstein distance {distance}; a Gaussian stays below {usual:.3f}, 99 times in 100)"
    return ""


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def agreement(simulation: Simulation) -> tuple[Status, str]:
    """Whether theory expected what was seen, as a status and in words."""
    if simulation.preset is None or not simulation.preset.expects:
        return "silent", "theory expects nothing of just these numbers; its curves are drawn where it has any"
    met, total = sum(simulation.met), len(simulation.met)
    words = f"{simulation.preset.source} expects: {simulation.preset.expects}"
    status: Status = "agrees" if met == total else "departs" if met == 0 else "undecided"
    return status, f"{words}; seen in {met} of {total} clouds"
