"""`python -m experiments NAME [--form FORM] [--folder FOLDER]`: run an experiment, reduced by default."""

import argparse
import importlib
import json
import math
from pathlib import Path
from typing import Any

NAMES = ("metric", "specific_heat", "ascent", "filtering", "rest", "needed", "linearity", "contraction")


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
    forms = "reduced: two cores, under ten minutes; extended: an hour; full: mostly a GPU"
    parser.add_argument("--form", choices=("reduced", "extended", "full"), default="reduced", help=forms)
    parser.add_argument("--folder", type=Path, help="run folder; default: runs/experiments/NAME")
    arguments = parser.parse_args()
    experiment = importlib.import_module(f"experiments.{arguments.name}.experiment")
    settings = getattr(experiment, arguments.form.upper(), None)
    if settings is None:
        parser.error(f"{arguments.name} has no {arguments.form} form")
    suffix = "" if arguments.form == "reduced" else f"_{arguments.form}"
    folder = arguments.folder or Path("runs/experiments") / f"{arguments.name}{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    results = experiment.run(settings, folder)
    results = rounded(results)
    (folder / "results.json").write_text(json.dumps(results) + "\n")
    print(json.dumps(results["answer"], indent=1))
    print(f"Results: {folder / 'results.json'}")


if __name__ == "__main__":
    main()
