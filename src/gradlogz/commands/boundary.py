"""Exit status of commands: bad input is reported in one line, with status 2.

    done                                              0
    a statement of verify fails                       1
    other exceptions, which are bugs                  1, with a traceback
    bad input, or an output that cannot be written    2, one line on standard error
    too little memory                                 2, one line on standard error
    the same after results were written               3, one line that names the results
    parts of divided work fail                        3, one line for each; the results of the others are written
    Ctrl-C or SIGTERM                                 130; probe writes the results so far
    a closed pipe                                     1 (typer)

Law: tests/commands/test_bad_input_is_one_line_and_other_errors_keep_their_traceback.py,
tests/faults/test_signals_end_commands_with_130.py.
"""

import errno
import functools
import inspect
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from .._foreign_text import visible
from .._input_errors import InputError
from .logs import Level, LogLevel, logged

REFUSED = 2
PARTIAL = 3
INTERRUPTED = 130  # as shells have it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ALLOCATION = re.compile("can't allocate memory|out of memory|Storage size calculation overflowed")  # errors of torch


def bounded(command: Callable[..., int]) -> Callable[..., NoReturn]:
    """Wrap a command, with the same options and --log-level, so that it ends the process with its exit status."""

    @functools.wraps(command)
    def run(*args: object, log_level: Level = Level.WARNING, **options: object) -> NoReturn:
        _prepare()
        try:
            with logged(log_level):
                status = command(*args, **options)
            sys.stdout.flush()  # raises here if the pipe is closed, not while the interpreter shuts down
        except InputError as error:
            written = f" The results in {error.results} are kept." if error.results else ""
            _print_error(f"{error}{written}")
            status = PARTIAL if error.results else REFUSED
        except OSError as error:
            if error.errno not in FULL or error.filename is not None:
                raise
            _print_error(f"gradlogz: standard output cannot be written ({error.strerror}). Free some space.")
            _discard_standard_output()
            status = REFUSED
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not ALLOCATION.search(str(error)):
                raise
            _print_error("gradlogz: there is too little memory. Ask for less at a time, or use a larger machine.")
            logging.getLogger(__name__).debug("too little memory", exc_info=error)
            status = REFUSED
        sys.exit(status)

    signature = inspect.signature(command)
    option = inspect.Parameter("log_level", inspect.Parameter.KEYWORD_ONLY, default=Level.WARNING, annotation=LogLevel)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "log_level": LogLevel}
    return run


def _prepare() -> None:
    """Let every character be printed in every encoding, and SIGTERM interrupt as Ctrl-C does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _print_error(text: str) -> None:
    print(visible(" ".join(text.splitlines())), file=sys.stderr)


def _discard_standard_output() -> None:
    """Send what is left in the buffer of standard output nowhere: the interpreter would fail on it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
