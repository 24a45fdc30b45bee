"""Replicates of findings: their values in the replicates of documents, from which differences of runs have intervals.

    replicates.safetensors    one tensor [rows, r] for each judged quantity, and the degrees of freedom of its rows
                              r = 200 bootstrap samples, or 8 groups of the jackknife; float32, NaN for rows without

Rows are those of the quantity in findings.json, in their order. Replicate i weights the same documents in the same way
in every run, so that replicates of runs on the same documents are paired.

Read next: ../statistics/estimates.py (intervals from replicates), differences.py (differences of runs).
"""

import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from ..._paths import is_plain_file
from ..._typing import Float, Tensor
from .judgement import Judgement, Measured, split
from .records import Finding

REPLICATES = "replicates.safetensors"
Place = tuple[str, str, str, int, int | None, str]  # model, prediction, layer, call, head and quantity of a finding


class Replicates(NamedTuple):
    """Values of one finding in the replicates of documents, and the degrees of freedom of its interval."""

    values: Float[Tensor, " r"]
    freedom: float


def replicates_of(
    model: str, prediction: str, values: Iterable[Measured], judged: Judgement
) -> dict[Place, Replicates]:
    """Return the replicates of the judged findings and of those that the claim summarises."""
    wanted = {place_of(f) for f in judged.findings if f.verdict or f.quantity == judged.quantity}
    places = {(model, prediction, *split(m.layer), m.head, m.quantity): m for m in values}
    return {
        place: Replicates(m.replicates, m.freedom)
        for place, m in places.items()
        if place in wanted and m.replicates is not None
    }


def place_of(finding: Finding) -> Place:
    """Return the fields that identify a finding."""
    return finding[:6]


def write_replicates(path: Path, rows: Iterable[Finding], replicates: Mapping[Place, Replicates]) -> None:
    """Write the replicates of findings, if there are any and safetensors is installed."""
    if not replicates or find_spec("safetensors") is None:
        return
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    for name, members in _by_quantity(rows).items():
        stored = [replicates.get(place_of(row)) for row in members]
        sizes = {len(each.values) for each in stored if each is not None}
        for r in sizes:
            nothing = Replicates(torch.full((r,), math.nan), math.nan)
            some = [nothing if each is None or len(each.values) != r else each for each in stored]
            tensors[f"{name} [{r}]"] = torch.stack([each.values.float() for each in some])
            tensors[f"{name} [{r}] freedom"] = torch.tensor([each.freedom for each in some])
    path.write_bytes(save(tensors))


def read_replicates(path: Path, rows: Iterable[Finding]) -> dict[Place, Replicates] | str:
    """Return the replicates of findings, or the reason why they cannot be read."""
    if not is_plain_file(path):
        return "no such file"
    if find_spec("safetensors") is None:
        return "safetensors is not installed"
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        return f"damaged, {type(error).__name__}"
    replicates: dict[Place, Replicates] = {}
    for name, members in _by_quantity(rows).items():
        for key in (key for key in tensors if key.startswith(f"{name} [") and key.endswith("]")):
            values, freedom = tensors[key], tensors.get(f"{key} freedom")
            if values.ndim != 2 or freedom is None or not len(values) == len(freedom) == len(members):
                return "other rows than those of the findings"
            for row, each, number in zip(members, values, freedom.tolist(), strict=True):
                if not each.isnan().all():
                    replicates[place_of(row)] = Replicates(each, number)
    return replicates


def _by_quantity(rows: Iterable[Finding]) -> Mapping[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for row in rows:
        grouped.setdefault(f"{row.model}: {row.prediction}: {row.quantity}", []).append(row)
    return grouped
