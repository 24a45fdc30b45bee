"""The form of every message, `call: argument must condition; got fact. Remedy.`, and how a test asks for one.

A test file lists its refusals: the error, the message up to the remedy, and the call that must fail with it.
"""

import re
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradlogz
from gradlogz._errors import InputTypeError, InputValueError, MissingPackageError

PACKAGE = Path(gradlogz.__file__).parent
FORM = re.compile(r"[A-Za-z_]\w*(\.\w+)?: .+ must .+; got .+\. \S.*\.")

REFUSALS = {ValueError: InputValueError, TypeError: InputTypeError, ImportError: MissingPackageError}

Refusal = tuple[type[Exception], str, Callable[[], Any]]


def each_of(refusals: list[Refusal]) -> pytest.MarkDecorator:
    """Run a test over all refusals, each named by its message; folders of one run only are left out of the name."""
    passing = re.escape(tempfile.gettempdir()) + r"/[^/ ]+"
    return pytest.mark.parametrize("refusal", refusals, ids=[re.sub(passing, "...", says) for _, says, _ in refusals])


def refused(refusal: Refusal) -> tuple[str, int]:
    """Check the error and its message; return the file and the line that raised it."""
    error, says, call = refusal
    with pytest.raises(error) as caught:
        call()
    assert caught.type is REFUSALS.get(error, error)
    check_form(message := str(caught.value))
    assert message.startswith(f"{says} "), message
    raised = traceback.extract_tb(caught.value.__traceback__)[-1]
    return Path(raised.filename).relative_to(PACKAGE).as_posix(), raised.lineno


def check_form(message: str) -> None:
    """One paragraph of the agreed form that shows shapes and counts, never the numbers of a tensor."""
    assert FORM.fullmatch(message), message  # `.` matches no line break
    assert message.count("; got ") == 1, message
    for fragment in ("tensor(", "dtype=", "[["):
        assert fragment not in message, message
