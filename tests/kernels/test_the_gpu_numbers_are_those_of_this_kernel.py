"""What was measured on a GPU was measured with the kernels as they stand: no GPU is here to measure again."""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_hash_of_the_kernels_is_the_measured_one():
    measured = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["sha256 of gpu.py"]
    source = (ROOT / "src" / "gradlogz" / "kernels" / "gpu.py").read_bytes()
    assert hashlib.sha256(source).hexdigest() == measured, "run benchmarks/attention_gpu.py on a GPU again"
