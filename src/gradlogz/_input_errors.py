"""Bad input: the exceptions that the command line turns into one line and exit status 2.

A leaf without torch, so that the command line knows them before torch is imported.

Read next: _errors.py (checks of tensors), commands/boundary.py (where they are caught).
"""


class InputError(Exception):
    """Bad input, refused at the boundary; the command line prints it as one line and exits with 2."""


class InputValueError(InputError, ValueError):
    """An argument with a value that cannot be used."""


class InputTypeError(InputError, TypeError):
    """An argument of a type that cannot be used."""


class InputRuntimeError(InputError, RuntimeError):
    """Input that proves unusable only while it is used: a model without attention, a batch larger than memory."""


class MissingPackageError(InputError, ImportError):
    """An optional package that the call needs and that is not installed."""


def sentence(call: str, condition: str, fact: str, remedy: str) -> str:
    """The form of every message of this package."""
    return f"{call}: {condition}; got {fact}. {remedy}"
