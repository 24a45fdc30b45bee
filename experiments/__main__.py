"""`python -m experiments NAME [--full] [--folder FOLDER]`: run an experiment, reduced by default."""

import argparse
import importlib
import json
import math
from pathlib import Path
from typing import Any

NAMES = ("metric", "specific_heat", "ascent")


def rounded(value: Any) -> Any:
    """Numbers with six significant digits, in nested dictionaries and lists; None for those that are not finite.

    >>> rounded({"mean": [1 / 3, 2]})
    {'mean': [0.333333, 2]}
    """
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def main() -> None:
    """Run the experiment and print its answer; the results are in FOLDER/results.json."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Train the models of an experiment.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--full", action="store_true", help="the form for a GPU; default: two cores, under ten minutes")
    parser.add_argument("--folder", type=Path, help="run folder; default: runs/experiments/NAME")
    arguments = parser.parse_args()
    experiment = importlib.import_module(f"experiments.{arguments.name}.experiment")
    folder = arguments.folder or Path("runs/experiments") / f"{arguments.name}{'_full' if arguments.full else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    results = experiment.run(experiment.FULL if arguments.full else experiment.REDUCED, folder)
    results = rounded(results)
    (folder / "results.json").write_text(json.dumps(results) + "\n")
    print(json.dumps(results["answer"], indent=1))
    print(f"Results: {folder / 'results.json'}")


if __name__ == "__main__":
    main()
