"""Exceptions for bad input, which the command line prints as one line with exit status 2.

    call: what is wrong with which argument (the value, if it helps). What to do.

A leaf without torch, so that the command line can catch them before torch is imported.

Read next: _errors.py (checks of tensors), commands/boundary.py (where they are caught).
"""

from collections.abc import Callable


class InputError(Exception):
    """Bad input, refused at the boundary; the command line prints it as one line and exits with status 2.

    Attributes:
        call: the function or command that was called.
        argument: the argument at fault; None where no single one is.
        results: files or folders of results that were written before; None if there are none.
    """

    results: str | None = None

    def __init__(self, call: str, argument: str | None, problem: str, remedy: str) -> None:
        super().__init__(f"{call}: {problem}. {remedy}")
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Callable[..., "InputError"], tuple[object, ...], dict[str, object]]:
        """Pickle by message and attributes, since worker processes send their errors back."""
        return _restored, (type(self), str(self)), self.__dict__


class InputValueError(InputError, ValueError):
    """An argument with an unusable value."""


class InputTypeError(InputError, TypeError):
    """An argument of an unusable type."""


class InputRuntimeError(InputError, RuntimeError):
    """Input that proves unusable only during the computation, such as a model without attention."""


class InputNotImplementedError(InputError, NotImplementedError):
    """A combination of arguments, or a kind of model, that is not supported."""


class MissingPackageError(InputError, ImportError):
    """A missing optional package that the call needs."""


def _restored(kind: type[InputError], message: str) -> InputError:
    """Rebuild an error from its finished message."""
    error = kind.__new__(kind, message)
    error.args = (message,)
    return error
