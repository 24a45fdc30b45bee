"""Check of the packages that pages need."""

import importlib.util


def missing() -> str | None:
    """Name of the first package that pages need and that is not installed; None if all are."""
    return next((name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None), None)
