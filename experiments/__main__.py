"""`python -m experiments NAME [--form FORM] [--folder FOLDER]`: run an experiment, reduced by default.

Exit status: 0 done, 2 bad input, 3 runs failed (the others are kept), 130 interrupted; the same command continues.
"""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from gradlogz._input_errors import InputError
from gradlogz.engine import ENGINES, engine_of

from .workers import FailedRunsError, Workers

NAMES = ("published", "metric", "specific_heat", "ascent", "filtering", "rest", "needed", "linearity", "contraction")
FORMS = ("reduced", "extended", "full", "replication")


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
    forms = "reduced: two cores, under ten minutes; extended: an hour; full: mostly a GPU; replication: other seeds"
    parser.add_argument("--form", choices=FORMS, default="reduced", help=forms)
    parser.add_argument("--folder", type=Path, help="run folder; default: runs/experiments/NAME")
    where = (
        "who computes the runs; default: processes, or process where there is a GPU, which all processes would share"
    )
    parser.add_argument("--engine", choices=ENGINES, help=where)
    parser.add_argument("--workers", type=int, help="most runs at a time; default: number of cores")
    parser.add_argument("--address", help="Ray cluster: auto or HOST:PORT; default: a new one on this machine")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each run, on Slurm or Ray; default: 0")
    parser.add_argument("--restart", action="store_true", help="measure all runs again; complete ones are not trained")
    arguments = parser.parse_args()
    experiment = importlib.import_module(f"experiments.{arguments.name}.experiment")
    settings = getattr(experiment, arguments.form.upper(), None)
    if settings is None:
        parser.error(f"{arguments.name} has no {arguments.form} form")
    suffix = "" if arguments.form == "reduced" else f"_{arguments.form}"
    folder = arguments.folder or Path("runs/experiments") / f"{arguments.name}{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # as engines compute, so that the environment in the results is that of the runs
    name = arguments.engine or ("process" if torch.cuda.is_available() else "processes")
    try:
        engine = engine_of(
            "experiment", name, workers=arguments.workers, folder=folder, address=arguments.address, gpus=arguments.gpus
        )
        results = rounded(experiment.run(settings, folder, Workers(engine, arguments.restart)))
    except InputError as error:
        sys.exit(_end(2, error))
    except FailedRunsError as error:
        sys.exit(_end(3, error))
    except KeyboardInterrupt:
        sys.exit(_end(130, "interrupted; the same command continues"))
    (folder / "results.json").write_text(json.dumps(results) + "\n")
    print(json.dumps(results["answer"], indent=1))
    print(f"Results: {folder / 'results.json'}")


def _end(status: int, text: object) -> int:
    print(text, file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
