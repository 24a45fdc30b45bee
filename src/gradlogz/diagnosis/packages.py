"""Installed packages, by the extra of gradlogz that needs them.

The list is that of pyproject.toml, read from the metadata of the installed distribution.
"""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

PURPOSES = {
    "": "the library",
    "cli": "the command line",
    "fast": "compiled CPU kernels of attention and filters",
    "probe": "Hugging Face models",
    "report": "HTML pages",
    "tables": "data frames and parquet files",
    "slurm": "work on Slurm",
    "cluster": "work on Ray",
}
REQUIREMENT = re.compile(r"""([\w.-]+)([^;]*?)\s*(?:;.*extra\s*==\s*["'](\w+)["'].*)?""")


class NeededPackage(NamedTuple):
    """A package that gradlogz or one of its extras needs; `version` is None if it is not installed."""

    name: str
    needed: str
    extra: str
    version: str | None


def packages() -> list[NeededPackage]:
    """Packages of the library and of the extras in PURPOSES, in the order of pyproject.toml."""
    return [NeededPackage(*part, installed(part[0])) for line in _requirements() if (part := _parsed(line)) is not None]


def installed(name: str) -> str | None:
    """Version of an installed package; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def missing_extras(needed: list[NeededPackage]) -> dict[str, list[str]]:
    """Packages that are not installed, by extra."""
    missing: dict[str, list[str]] = {}
    for package in needed:
        if package.version is None:
            missing.setdefault(package.extra, []).append(package.name)
    return missing


def _requirements() -> list[str]:
    try:
        return requires("gradlogz") or []
    except PackageNotFoundError:  # run from a folder of sources
        return []


def _parsed(line: str) -> tuple[str, str, str] | None:
    """Name, range of versions and extra of a requirement; None for extras of other extras and of the tests."""
    match = REQUIREMENT.fullmatch(line)
    if match is None:
        return None
    name, needed, extra = match[1], match[2], match[3] or ""
    return (name, needed, extra) if extra in PURPOSES else None
