"""Power of the claims on planted models, as measured by benchmarks/probe_calibration.py.

planted_power.json has one sentence for each claim, written by benchmarks/tables.py from the results of the benchmark.

Read next: runs/records.py (declarations, which contain it).
"""

import json
from functools import lru_cache
from pathlib import Path


def planted_power(prediction: str) -> str:
    """Return the shares of supported and refuted heads or layers by size of the planted effect; empty if unknown."""
    return _sentences().get(prediction, "")


@lru_cache
def _sentences() -> dict[str, str]:
    sentences: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return sentences
