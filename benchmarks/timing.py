"""Timing side by side: every alternative once per round, medians over rounds, the first one twice as an A/A row."""

import statistics
import time
from collections.abc import Callable


def compare(alternatives: dict[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """Median seconds of each alternative; "A/A" is the first one measured again."""
    first = next(iter(alternatives))
    calls = {**alternatives, "A/A": alternatives[first]}
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
