"""What was measured on a GPU was measured with the code of the present kernels: no GPU is here to measure again."""

import json
from pathlib import Path

import pytest

from benchmarks.source_hash import source_hash

ROOT = Path(__file__).parents[2]
HOPPER = {"gpu.py", "hopper.py", "hopper_backward.py", "hopper_tiles.py", "backward_plan.py", "segment_spans.py"}
KERNELS = {
    "rows": HOPPER,
    "training": HOPPER,
    "masks": HOPPER,
    "packed": HOPPER,
    "decoding": {"gpu.py", "decoding.py"},
}


# Sections whose numbers are older than their kernels or missing, and the words with which the documentation says so.
OLDER = {
    "masks": "These numbers were measured with an earlier version of the kernels",
    "packed": "Packed documents have not been measured on a GPU with the present kernels",
}


@pytest.mark.parametrize("section", KERNELS)
def test_the_hashes_of_the_kernels_are_the_measured_ones(section):
    measured = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["sha256"]
    measured = {name: measured.get(section, {}).get(name) for name in KERNELS[section]}
    kernels = ROOT / "src" / "gradlogz" / "kernels" / "attention"
    expected = {name: source_hash(kernels / name) for name in KERNELS[section]}
    if section in OLDER:
        assert measured != expected, "measured again: take it out of OLDER, and the words out of the page"
        assert OLDER[section] in " ".join((ROOT / "docs" / "attention.md").read_text().split())
    else:
        assert measured == expected, f"run benchmarks/attention_gpu.py {section} on a GPU again"


def test_only_what_is_computed_changes_the_hash(tmp_path):
    hashes = []
    for name, source in enumerate(
        (
            'def f(x):\n    """Twice."""\n    return 2 * x\n',
            "def f(x):  # twice\n\n    return (2 * x)\n",
            "def f(x):\n    return 3 * x\n",
        )
    ):
        (tmp_path / str(name)).write_text(source)
        hashes.append(source_hash(tmp_path / str(name)))
    assert hashes[0] == hashes[1] != hashes[2]
