"""Lists to which registered layers append their results."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..result import Attention

collections: list[tuple[list[Attention], bool]] = []  # results, and whether gradients were enabled around the model


@contextmanager
def not_collected() -> Iterator[None]:
    """Context in which nothing is collected: for the eager pass of a monitor, which is not the user's."""
    before = collections[:]
    collections.clear()
    try:
        yield
    finally:
        collections[:] = before
