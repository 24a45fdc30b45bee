"""Log messages of a command on standard error, at and above a level.

    2026-05-01 12:00:00 INFO gradlogz.engine.work_loop: part-003 finished in 12.1 s (4 of 64, 721 s left)

Modules log to a logger of their own name, below that of the package. Programs that use the package configure it with
the standard module `logging`; without that there is no output.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, TextIO

import typer

from .._foreign_text import visible


class Level(StrEnum):
    """Levels of the standard module."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[
    Level, typer.Option(help="Least level of log messages: debug, info, warning or error.", metavar="LEVEL")
]


@contextmanager
def logged(level: Level) -> Iterator[None]:
    """Context in which messages of the package at and above a level are written to standard error."""
    logger, handler = logging.getLogger(__name__.partition(".")[0]), _StandardError()
    handler.setFormatter(_Line("{asctime} {levelname} {name}: {message}", "%Y-%m-%d %H:%M:%S", style="{"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the present standard error, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Line(logging.Formatter):
    """Lines in which names of strangers cannot move the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
