"""The boundary of the command line: bad input becomes one line and exit status 2.

    InputError         one line on standard error     2
    other exceptions   their traceback                1
    Ctrl-C             nothing                        130, by typer
    a closed pipe      nothing                        1, by typer

Law: tests/commands/test_bad_input_is_one_line_and_other_errors_keep_their_traceback.py.
"""

import functools
import sys
from collections.abc import Callable
from typing import NoReturn

from .._input_errors import InputError

REFUSED = 2


def bounded(command: Callable[..., int]) -> Callable[..., NoReturn]:
    """The command with the same options, which ends the process with its exit status."""

    @functools.wraps(command)
    def run(*args: object, **options: object) -> NoReturn:
        try:
            status = command(*args, **options)
        except InputError as error:
            print(" ".join(str(error).splitlines()), file=sys.stderr)
            status = REFUSED
        sys.stdout.flush()  # a pipe that was closed is noticed here, not while the interpreter shuts down
        sys.exit(status)

    return run
