"""Cache of results that several callers need.

Read next: batch_pass.py (one cache per event of a batch), prediction.py (one per evaluation).
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Computed:
    """Results by name and by the object from which they are computed.

    Objects are identified by id and are referenced together with their results, so that an id is not reused.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[int, Hashable], tuple[object, Any]] = {}

    def once(self, subject: object, name: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of this name for an object, computed at the first call."""
        key = (id(subject), name)
        if key not in self._results:
            self._results[key] = (subject, compute())
        result: T = self._results[key][1]
        return result

    def clear(self) -> None:
        """Discard all objects and their results."""
        self._results.clear()
