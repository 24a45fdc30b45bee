"""The forms of two experiments that are for a GPU, within one time limit.

    python -m experiments.on_gpu FOLDER --seconds 80    train; complete runs are kept when the time ends
    python -m experiments.on_gpu FOLDER --judge         write the results of complete runs beside the plans

    delayed    form of specific_heat; the number of steps is the largest of STEPS for which a measurement of the speed,
               before any training, leaves enough time for the others
    ascent     models of the extended form with eight seeds, all value maps; FOLDER/ascent/text has its text, or the
               text of this machine is used
    full       form of specific_heat; primes whose runs are not all complete are left out

Only the last checkpoint is written. A command that is repeated trains what is not complete.

Read next: ensembles.py (runs trained together), specific_heat/experiment.py, ascent/experiment.py.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch

from .__main__ import rounded
from .ascent import experiment as ascent
from .ensembles import Trainer
from .pages import EXPERIMENTS
from .run_folders import RunFolder
from .specific_heat import experiment as heat
from .specific_heat import page as heat_page
from .specific_heat.ensembles import PairEnsemble
from .transformer import Objective

STEPS = (20_000, 16_000, 14_000, 12_000, 10_000, 8000)
PART = 0.5  # of the time, for the delayed form
TIMED = 30  # steps
VALUE_MAPS = ("free", "tied, equal compute", "tied, equal parameters")  # in this order

Clock = Callable[[], float]


def train_within(
    folder: Path, seconds: float, delayed: heat.Settings, text: ascent.Settings, full: heat.Settings
) -> None:
    """Train the runs of all forms until the time is over."""
    begun = time.perf_counter()

    def left() -> float:
        return seconds - (time.perf_counter() - begun)

    forms: list[Callable[[], None]] = [
        lambda: train_heat(delayed_of_speed(delayed, folder / "delayed", left), folder / "delayed", left),
        lambda: train_ascent(text, folder / "ascent", left),
        lambda: train_heat(full, folder / "full", left),
    ]
    for train_form in forms:
        try:
            train_form()
        except Exception:  # the time that is left is for the other forms
            traceback.print_exc()


def delayed_of_speed(settings: heat.Settings, folder: Path, left: Clock) -> heat.Settings:
    """The delayed form with the steps of its runs, or for new ones the largest number for which there is time."""
    steps = steps_of(folder)
    if steps is None:
        per_step = sum(seconds_per_step(share, settings, folder.parent / "timed") for share in settings.shares)
        fitting = [n for n in STEPS if n <= settings.steps and n * per_step < PART * left()]
        steps = max(fitting, default=min(STEPS[-1], settings.steps))
        print(f"delayed form: {1000 * per_step:.3f} ms for a step of all runs, {steps} steps", flush=True)
    return replace(settings, steps=steps)


def steps_of(folder: Path) -> int | None:
    """Number of steps of the runs in a folder, None if there are none."""
    path = next(folder.glob("*/config.json"), None)
    return None if path is None else int(json.loads(path.read_text())["training"]["steps"])


def train_heat(settings: heat.Settings, folder: Path, left: Clock) -> None:
    """Train the runs of a form of specific_heat, prime by prime, and print their landmarks."""
    for p in settings.primes:
        for share in settings.shares:
            begun = time.perf_counter()
            if left() <= 0 or not heat.train_share(p, share, settings, folder, left(), all_checkpoints=False):
                print(f"p = {p}, share {share}: not complete when the time was over", flush=True)
                return
            print(f"p = {p}, share {share}: {time.perf_counter() - begun:.1f} s", flush=True)
            for kind, each in settings.kinds.items():
                if each.share == share:
                    runs = [RunFolder(heat.place(folder, p, kind, seed)) for seed in settings.seeds_of(kind)]
                    marks = [(m.peak, m.memorised, m.onset) for m in (heat.landmarks(run.curves) for run in runs)]
                    print(f"  {kind}: peak, memorised, onset", *marks, flush=True)


def train_ascent(settings: ascent.Settings, folder: Path, left: Clock) -> None:
    """Train the models of ascent, cell by cell, and print their held-out losses."""
    text = settings.text(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    batches = {name: ascent.batches_of(name, settings, text, device) for name in get_args(Objective)}
    cells = sorted(ascent.cells(settings.value_maps), key=lambda cell: VALUE_MAPS.index(cell.value_map))
    for cell in cells:
        begun = time.perf_counter()
        if left() <= 0 or not ascent.train_cell(cell, settings, text, folder, batches[cell.objective], left()):
            print(f"{', '.join(cell)}: not complete when the time was over", flush=True)
            return
        runs = [RunFolder(ascent.place(folder, cell, seed)) for seed in settings.every_seed]
        losses = [f"{run.curves[-1]['held_out_loss']:.4f}" for run in runs]
        print(f"{', '.join(cell)}: {time.perf_counter() - begun:.1f} s, held-out losses", *losses, flush=True)


def seconds_per_step(share: float, settings: heat.Settings, folder: Path) -> float:
    """Measured time of a training step of the runs with one share of the pairs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high" if settings.tf32 and device.type == "cuda" else "highest")
    members = heat.members_of(settings.primes[0], share, settings, folder)
    ensemble = PairEnsemble([member.model for member in members], device)
    trainer = Trainer(ensemble, [member.training for member in members], heat.batches_of(members, device))
    trainer.step()
    float(trainer.losses.sum())  # waits for the device
    begun = time.perf_counter()
    for _ in range(TIMED):
        trainer.step()
    float(trainer.losses.sum())
    return (time.perf_counter() - begun) / TIMED


# Results --------------------------------------------------------------------------------------------------------------


def judge(folder: Path, delayed: heat.Settings, text: ascent.Settings, full: heat.Settings) -> None:
    """Write results of complete runs beside the plans; models of text are probed, which takes a minute or two."""
    for name, settings in (("delayed", delayed), ("full", full)):
        judge_heat(name, settings, folder / name)
    rows = rows_of_ascent(text, folder / "ascent")
    if not rows:
        print("ascent: free models are not complete; its results are left as they were")
        return
    results = rounded(text.results(ascent.decisions(rows), rows)) | {"environment": environment_of(folder / "ascent")}
    (EXPERIMENTS / "ascent" / "compute.json").write_text(json.dumps(results) + "\n")
    print(json.dumps(results["answer"], indent=1))


def rows_of_ascent(settings: ascent.Settings, folder: Path) -> list[dict[str, Any]]:
    """Rows of the models of complete cells; none if a cell of free models is not complete."""
    complete = [cell for cell in ascent.cells(settings.value_maps) if is_complete(cell, settings, folder)]
    if not set(ascent.cells(("free",))) <= set(complete):
        return []
    text = settings.text(folder)
    items = product(complete, settings.every_seed)
    return [ascent.trained_and_probed(*item, settings, text, ascent.place(folder, *item)) for item in items]


def is_complete(cell: ascent.Cell, settings: ascent.Settings, folder: Path) -> bool:
    """Return whether all runs of a cell are complete."""
    places = [ascent.place(folder, cell, seed) for seed in settings.every_seed]
    return all((place / "complete.json").exists() for place in places)


def judge_heat(name: str, settings: heat.Settings, folder: Path) -> None:
    """Write results and curves of a form of specific_heat."""
    results = heat.judge(replace(settings, steps=steps_of(folder) or settings.steps), folder)
    if not results["runs"]:
        print(f"{name}: no complete runs; its results are left as they were")
        return
    results["environment"] = environment_of(folder)
    results["settings"]["tf32"] = results["environment"].get("float32 products") == "high"
    primes = set(results["settings"]["primes"])
    heat_page.write(name, rounded(results), heat_page.curves_of(folder, primes))
    print(json.dumps(rounded(results["answer"]), indent=1))


def environment_of(folder: Path) -> dict[str, str]:
    """Environment of the machine on which the runs of a folder were trained."""
    return json.loads(next(folder.glob("*/environment.json")).read_text())


def main() -> None:
    """Train or judge."""
    parser = argparse.ArgumentParser(prog="python -m experiments.on_gpu")
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--seconds", type=float, default=80.0, help="time limit of training")
    parser.add_argument("--judge", action="store_true", help="write results of complete runs; train nothing")
    parser.add_argument("--tiny", action="store_true", help="p = 7, a few steps: half a minute of one core")
    arguments = parser.parse_args()
    delayed, text, full = heat.DELAYED, ascent.GPU, heat.FULL
    if arguments.tiny:
        delayed, full = (replace(form, primes=(7,), seeds=2, steps=200) for form in (delayed, full))
        text = replace(text, training=replace(text.training, steps=4), batch_size=2, seeds=2, probe_tokens=512)
    if arguments.judge:
        judge(arguments.folder, delayed, text, full)
    else:
        train_within(arguments.folder, arguments.seconds, delayed, text, full)


if __name__ == "__main__":
    main()
