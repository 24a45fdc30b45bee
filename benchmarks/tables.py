"""The tables of docs/attention.md, made of the JSON in benchmarks/results.

python benchmarks/tables.py     writes them between their markers
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "attention.md"


def cpu() -> str:
    """Ratios to SDPA, one row per problem."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_cpu.json").read_text())["rows"]
    lines = ["| problem (heads x tokens x head size) | asked for | time / SDPA | SDPA / SDPA |", "|---|---|---|---|"]
    for row in rows:
        if "ratio" in row:
            lines.append(f"| {row['problem']} | {row['asked']} | {row['ratio']:.2f} | {row['A/A']:.2f} |")
    return "\n".join(lines)


def gpu() -> str:
    """Milliseconds, one row per shape."""
    table = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())
    columns = ("attend", "cudnn", "fa2", "flex with lse")
    lines = [
        "| batch, heads, tokens, size | mask | " + " | ".join(columns) + " | product, exponentials | attend / cuDNN |",
        "|---|---|" + "---|" * (len(columns) + 2),
    ]
    for with_backward in (False, True):
        for row in table["rows"]:
            ms = [row["ms"][f"{name} with backward" if with_backward else name] for name in columns]
            floor = row["floor with backward" if with_backward else "floor forward"]
            what = ("causal" if row["causal"] else "full") + (", with backward" if with_backward else "")
            times = " | ".join(f"{t:.2f}" for t in ms)
            limits = f"{floor['operations_ms']:.2f}, {floor['exponentials_ms']:.2f}"
            lines.append(f"| {tuple(row['shape'])} | {what} | {times} | {limits} | {ms[0] / ms[1]:.2f} |")
    return "\n".join(lines)


TABLES = {"cpu": cpu, "gpu": gpu}


def filled(page: str) -> str:
    """The page with each table between its markers."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
