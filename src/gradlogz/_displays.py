"""Registry of displays: which function shows a result of a given type in a given form.

    register(Findings, "html", f)         f(findings) returns HTML
    shown(findings, "html")               calls it

Forms are "html" (notebooks), "terminal" (rich), "text" (plain lines) and "plot" (figures). Results are defined below
`reporting` and must not import it, yet notebooks call their `_repr_html_`. Therefore `reporting` fills this registry
when it is imported, and `shown` imports it by name on first use. The import by name is not an edge of the import graph:
the definition of a result needs nothing from `reporting`.

Read next: reporting/pages_by_result.py, which fills the registry.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

PLAIN_WIDTH = 80  # columns of output that is no terminal

_DISPLAYS: dict[tuple[type, str], Callable[..., Any]] = {}


def register(result_type: type, form: str, function: Callable[..., Any]) -> None:
    """Make `function` the display of results of `result_type` in `form`; it is called with the result first."""
    _DISPLAYS[result_type, form] = function


def shown(result: Any, form: str, *arguments: Any, **options: Any) -> Any:
    """Return the display of a result in a form, by the function registered for its type or its nearest base class."""
    import_module("gradlogz.reporting")
    for base in type(result).__mro__:
        if (base, form) in _DISPLAYS:
            return _DISPLAYS[base, form](result, *arguments, **options)
    raise LookupError(f"{type(result).__name__} has no display as {form}")
