"""Interleaved timing: every alternative once per round, medians over rounds, the first one twice as the A/A row."""

import statistics
import time
from collections.abc import Callable


def compare(
    alternatives: dict[str, Callable[[], object]], rounds: int = 15, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each alternative by a clock; "A/A" is the first alternative measured again."""
    first = next(iter(alternatives))
    calls = {**alternatives, "A/A": alternatives[first]}
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
