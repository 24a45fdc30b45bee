"""Exit status of commands: bad input is reported in one line, with status 2.

    InputError         one line on standard error     2
    other exceptions   traceback                      1
    Ctrl-C             no output                      130 (typer)
    a closed pipe      no output                      1 (typer)

Law: tests/commands/test_bad_input_is_one_line_and_other_errors_keep_their_traceback.py.
"""

import functools
import sys
from collections.abc import Callable
from typing import NoReturn

from .._input_errors import InputError

REFUSED = 2


def bounded(command: Callable[..., int]) -> Callable[..., NoReturn]:
    """Wrap a command, with the same options, so that it ends the process with its exit status."""

    @functools.wraps(command)
    def run(*args: object, **options: object) -> NoReturn:
        try:
            status = command(*args, **options)
        except InputError as error:
            print(" ".join(str(error).splitlines()), file=sys.stderr)
            status = REFUSED
        sys.stdout.flush()  # raises here if the pipe is closed, not while the interpreter shuts down
        sys.exit(status)

    return run
