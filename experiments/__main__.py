"""`python -m experiments NAME [--full] [--folder FOLDER]`: run an experiment, reduced by default."""

import argparse
import importlib
import json
from pathlib import Path

NAMES = ("metric", "specific_heat", "ascent")


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
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["answer"], indent=1))
    print(f"Results: {folder / 'results.json'}")


if __name__ == "__main__":
    main()
