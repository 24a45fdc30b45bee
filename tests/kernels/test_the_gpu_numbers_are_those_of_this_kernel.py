"""What was measured on a GPU was measured with the kernels as they stand: no GPU is here to measure again."""

import hashlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOPPER = {"gpu.py", "hopper.py", "hopper_backward.py", "hopper_tiles.py", "backward_plan.py", "segment_spans.py"}
KERNELS = {
    "rows": HOPPER,
    "training": HOPPER,
    "masks": HOPPER,
    "decoding": {"gpu.py", "decoding.py"},
}


# Sections whose numbers are older than their kernels, and the words with which the documentation says so.
OLDER = {"masks": "These numbers were measured with an earlier version of the kernels"}


@pytest.mark.parametrize("section", KERNELS)
def test_the_hashes_of_the_kernels_are_the_measured_ones(section):
    measured = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["sha256"][section]
    measured = {name: measured.get(name) for name in KERNELS[section]}
    kernels = ROOT / "src" / "gradlogz" / "kernels" / "attention"
    found = {name: hashlib.sha256((kernels / name).read_bytes()).hexdigest() for name in KERNELS[section]}
    if section in OLDER:
        assert found != measured, "measured again: take it out of OLDER, and the words out of the page"
        assert OLDER[section] in " ".join((ROOT / "docs" / "attention.md").read_text().split())
    else:
        assert found == measured, f"run benchmarks/attention_gpu.py {section} on a GPU again"
