"""The form of every message, `call: problem. Remedy.`, and how a test asks for one.

A test file lists its refusals: the error, the call and the argument at fault, one keyword of the message, and the call
that must fail with it. The wording is free.
"""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradlogz
from gradlogz._errors import (
    InputNotImplementedError,
    InputRuntimeError,
    InputTypeError,
    InputValueError,
    MissingPackageError,
)

PACKAGE = Path(gradlogz.__file__).parent
FORM = re.compile(r"(--)?[A-Za-z_]\w*(\.\w+)?: \S.+\. \S.*\.")

REFUSALS = {
    ValueError: InputValueError,
    TypeError: InputTypeError,
    RuntimeError: InputRuntimeError,
    NotImplementedError: InputNotImplementedError,
    ImportError: MissingPackageError,
}

Refusal = tuple[type[Exception], str, str, Callable[[], Any]]


def each_of(refusals: list[Refusal]) -> pytest.MarkDecorator:
    """Run a test over all refusals, each named by its call, argument and keyword."""
    return pytest.mark.parametrize("refusal", refusals, ids=[f"{at} {keyword}" for _, at, keyword, _ in refusals])


def refused(refusal: Refusal) -> tuple[str, int]:
    """Check the error, its call and argument and a keyword; return the file and the line that raised it."""
    error, at, keyword, call = refusal
    with pytest.raises(error) as caught:
        call()
    assert caught.type is REFUSALS.get(error, error)
    check_form(message := str(caught.value))
    assert f"{caught.value.call}: {caught.value.argument}" == at
    assert message.startswith(f"{caught.value.call}: ")
    assert keyword in message, message
    raised = traceback.extract_tb(caught.value.__traceback__)[-1]
    return Path(raised.filename).relative_to(PACKAGE).as_posix(), raised.lineno


def check_form(message: str) -> None:
    """Check for one paragraph of a problem and a remedy that shows shapes and counts, never the entries of a tensor."""
    assert FORM.fullmatch(message), message  # `.` matches no line break
    for fragment in ("tensor(", "dtype=", "[["):
        assert fragment not in message, message
