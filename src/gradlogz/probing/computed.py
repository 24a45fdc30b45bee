"""Results that several callers want, each computed once.

Read next: batch_pass.py (of the events of a batch), prediction.py (of an evaluation).
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Computed:
    """Results by the object that they are computed from and a name.

    An object is known by its identity and is held beside its results, so that no other one can take its place.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[int, Hashable], tuple[object, Any]] = {}

    def once(self, subject: object, name: Hashable, compute: Callable[[], T]) -> T:
        """The result of this name for an object; computed at the first call."""
        key = (id(subject), name)
        if key not in self._results:
            self._results[key] = (subject, compute())
        result: T = self._results[key][1]
        return result

    def clear(self) -> None:
        """Let go of all objects and their results."""
        self._results.clear()
