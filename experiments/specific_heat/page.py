"""Tables and figure of docs/experiments/specific_heat.md.

    results.json, curves.json                    the form with several primes
    delayed.json, delayed_curves.json            the delayed form, if it has been run

    python -m experiments.specific_heat.page

Read next: experiment.py (where the results come from).
"""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from ..pages import DOCS, EXPERIMENTS, replace_table
from .experiment import KINDS, ONSET

FOLDER = EXPERIMENTS / "specific_heat"
POINTS = 60  # of a curve in the figure
HYPOTHESES = {
    "H1 peak before onset": "H1 the peak precedes the onset",
    "H2 specific, against no decay": "H2 the peak is specific, against no decay",
    "H2 specific, against few pairs": "H2 the peak is specific, against few pairs",
    "H3 peak predicts onset": "H3 the peak predicts the onset",
    "published onset": "published onset",
}


def files_of(form: str) -> tuple[Path, Path]:
    """Results and curves of a form: "delayed", or any other for the form with several primes."""
    first, second = ("delayed", "delayed_curves") if form == "delayed" else ("results", "curves")
    return FOLDER / f"{first}.json", FOLDER / f"{second}.json"


def write(form: str, results: dict[str, Any], curves: list[dict[str, Any]]) -> None:
    """Write the files from which the page is made."""
    for path, content in zip(files_of(form), (results, curves), strict=True):
        path.write_text(json.dumps(content) + "\n")


def summary(results: dict[str, Any]) -> str:
    """Medians of the runs of each prime and kind, with the smallest and the largest."""
    lines = [
        "| kind | p | runs | generalise | memorised | peak | onset | before, at, after the onset | prominence |",
        "|---" * 9 + "|",
    ]
    for p in sorted({run["p"] for run in results["runs"]}):
        for kind in KINDS:
            runs = [run for run in results["runs"] if (run["p"], run["kind"]) == (p, kind)]
            onsets = [run for run in runs if run["onset"] is not None]
            signs = [(run["peak"] > run["onset"]) - (run["peak"] < run["onset"]) for run in onsets]
            order = ", ".join(str(signs.count(sign)) for sign in (-1, 0, 1)) if onsets else "none"
            marks = [_range([run[name] for run in runs], "d") for name in ("memorised", "peak", "onset")]
            cells = [kind, p, len(runs), len(onsets), *marks, order, _range([run["prominence"] for run in runs], ".2f")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _range(values: list[Any], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    middle = median(known)
    shown = f"{middle:.2f}" if form == ".2f" else f"{middle:.0f}"
    return f"{shown} ({min(known):{form}} to {max(known):{form}})"


def decided(results: dict[str, Any]) -> str:
    """Verdicts and numbers of the plan."""
    answer = results["answer"]
    lines = ["| hypothesis of the plan | verdict | difference or lag (95 % CI) |", "|---" * 3 + "|"]
    for name, title in HYPOTHESES.items():
        if name in answer:
            lines.append(f"| {title} | {answer[name]['verdict']} | {_numbers(name, answer[name])} |")
    return "\n".join([*lines, f"| together | {answer['verdict']} | |"])


def _numbers(name: str, row: dict[str, Any]) -> str:
    def ci(interval: dict[str, Any]) -> str:
        return f"{interval['mean']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"

    if name.startswith("H1"):
        lag = row["lag (log2)"]
        return f"lag {ci(lag)} in log2 of steps, {lag['number']} runs"
    if name.startswith("H2"):
        return f"time {ci(row['difference of log2 peak'])}, prominence {ci(row['difference of prominence'])}"
    if name.startswith("H3"):
        return f"rank correlation {row['rank correlation']:.2f}, p = {row['p-value']:.3f}"
    if "onset, prediction interval" not in row:
        return f"{row['runs that generalise']} runs generalise"
    low, high = row["onset, prediction interval"]
    return f"step {row['onset, geometric mean']:.0f}, one more run {low:.0f} to {high:.0f}"


def curves_of(folder: Path, primes: set[int]) -> list[dict[str, Any]]:
    """Heat and test accuracy of runs below a folder, with four digits and at no more than 60 steps, for the figure."""
    rows = []
    for path in sorted(folder.glob("*/curves.jsonl")):
        kind, p, seed = path.parent.name.rsplit("-", 2)
        if int(p) in primes:
            curves = thinned([json.loads(line) for line in path.read_text().splitlines()])
            columns = {
                name: [float(f"{row[name]:.4g}") for row in curves] for name in ("step", "heat", "test_accuracy")
            }
            rows.append({"kind": kind.replace("_", " "), "p": int(p), "seed": int(seed), **columns})
    return rows


def thinned(curves: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most POINTS rows, whose numbers are spaced evenly in the logarithm."""
    if len(curves) <= POINTS:
        return curves
    numbers = {round(math.exp(i / (POINTS - 1) * math.log(len(curves)))) - 1 for i in range(POINTS)}
    return [curves[i] for i in sorted(numbers)]


def figure(forms: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Heat and test accuracy of the largest prime through training: a panel for each kind, two rows for each form."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "specific_heat"
    rows = 2 * len(forms)
    fig, panels = plt.subplots(
        rows, len(KINDS), figsize=(10, 2.3 * rows), sharex="row", sharey="row", layout="constrained"
    )
    for number, (form, runs) in enumerate(forms.items()):
        heat, accuracy = panels[2 * number], panels[2 * number + 1]
        largest = max(run["p"] for run in runs)
        for column, kind in enumerate(KINDS):
            for run in (run for run in runs if (run["kind"], run["p"]) == (kind, largest)):
                step = [max(1, s) for s in run["step"]]
                heat[column].plot(step, run["heat"], lw=1)
                accuracy[column].plot(step, run["test_accuracy"], lw=1)
            heat[column].set_title(f"{kind}, delayed" if form == "delayed" else kind)
            accuracy[column].set_xlabel("step")
            accuracy[column].axhline(ONSET, color="grey", lw=0.8, ls=":")
            for panel in (heat[column], accuracy[column]):
                panel.set_xscale("log")
                panel.set_xlim(left=20)
        heat[0].set_ylabel("logit variance")
        accuracy[0].set_ylabel("test accuracy")
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def main() -> None:
    """Write the tables and the figure of every form that has been run."""
    page, drawn = DOCS / "experiments" / "specific_heat.md", {}
    for form, prefix in (("primes", ""), ("delayed", "delayed ")):
        results, curves = files_of(form)
        if results.exists():
            content = json.loads(results.read_text())
            replace_table(page, f"{prefix}heat", summary(content))
            replace_table(page, f"{prefix}decided", decided(content))
            drawn[form] = json.loads(curves.read_text())
    figure(drawn, DOCS / "pictures" / "specific_heat.svg")


if __name__ == "__main__":
    main()
