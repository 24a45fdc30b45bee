"""Tables of the documentation, made from the JSON files in benchmarks/results.

python benchmarks/tables.py     writes each table between its markers, and the declared power of the claims of the probe
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NAMES = (
    "attention.md",
    "layers.md",
    "models.md",
    "dynamics.md",
    "filters.md",
    "aircraft.md",
    "from_statsmodels.md",
    "findings.md",
    "probe.md",
    "contrastive.md",
    "performance.md",
    "scaling.md",
)
NOT_MEASURED = "Not measured yet."
PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in NAMES))
COLUMNS = (
    ("scalar", "none", "moments", "scalar, torch path"),
    ("output and log normaliser", "output and entropy", "covariance_product"),
)


def cpu() -> str:
    """Ratios to SDPA, one row per problem and one column per set of statistics."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_cpu.json").read_text())["rows"]
    rows = [row for row in rows if "ratio" in row]
    tables = []
    for columns in COLUMNS:
        problems: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["asked"] in columns:
                problems.setdefault(row["problem"], {"SDPA / SDPA": row["A/A"]})[row["asked"]] = row["ratio"]
        names = (*columns, "SDPA / SDPA")
        lines = ["| heads x tokens x head size | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for problem, ratios in problems.items():
            cells = (f"{ratios[name]:.2f}" if name in ratios else "" for name in names)
            lines.append(f"| {problem} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def performance() -> str:
    """Ratios of attention with its statistics to plain attention, on two cores and on a GPU."""
    results = ROOT / "benchmarks" / "results"
    lines = [
        "| device and rival | batch, heads, tokens, head size | mask | forward | forward and backward |",
        "|---|---|---|---|---|",
    ]
    cpu = {
        (row["problem"], row["asked"]): row for row in json.loads((results / "attention_cpu.json").read_text())["rows"]
    }
    for heads, tokens, size in ((8, 1024, 64), (8, 2048, 128)):
        problem = f"{heads} x {tokens} x {size}"
        forward = cpu[problem, "scalar"]["ratio"]
        both = cpu[f"{problem}, forward and backward", "output and log normaliser"]["ratio"]
        shape = (1, heads, tokens, size)
        lines.append(f"| two CPU cores, float32; SDPA | {shape} | full | {forward:.2f} | {both:.2f} |")
    for row in json.loads((results / "attention_gpu.json").read_text())["rows"]:
        ms, mask = row["ms"], "causal" if row["causal"] else "full"
        forward, both = (ms[f"attend{way}"] / ms[f"cudnn{way}"] for way in ("", " with backward"))
        lines.append(f"| H200, bfloat16; cuDNN | {tuple(row['shape'])} | {mask} | {forward:.2f} | {both:.2f} |")
    return "\n".join(lines)


def gpu() -> str:
    """Milliseconds, one row per shape."""
    table = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())
    columns = ("attend", "cudnn", "fa2", "flex with lse")
    lines = [
        "| batch, heads, tokens, size | mask | attend | cuDNN | FlashAttention-2 | FlexAttention with lse | "
        "bounds: products, exponentials | attend / cuDNN |",
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


def gpu_without_and_through() -> str:
    """Ratios to cuDNN without statistics, with them, and with the gradients of all of them, one row per shape."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["rows"]
    columns = {
        "forward, no statistics": "attend without statistics",
        "forward, statistics": "attend",
        "both, gradient of the output": "attend with backward",
        "both, gradients of every statistic": "attend with backward through every statistic",
    }
    lines = ["| batch, heads, tokens, size | mask | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for row in rows:
        cells = (f"{row['ratios'][f'{name} / cudnn']:.2f}" for name in columns.values())
        lines.append(f"| {tuple(row['shape'])} | {'causal' if row['causal'] else 'full'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_training() -> str:
    """Milliseconds of a training step on attend and on SDPA, one row per batch."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["training"]
    lines = ["| sequences x tokens | | attend | SDPA | SDPA again | attend / SDPA |", "|---|---|---|---|---|---|"]
    for row in rows:
        ms, (batch, tokens) = row["ms"], row["batch"]
        how = "compiled" if row["compiled"] else "eager"
        times = f"{ms['attend']:.1f} | {ms['sdpa']:.1f} | {ms['sdpa again']:.1f}"
        lines.append(f"| {batch} x {tokens} | {how} | {times} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def gpu_masks() -> str:
    """Milliseconds of attention with masks, and their ratio to those of the visible pairs alone, one row per mask."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["masks"]
    plain = next((row["ms"]["attend"] for row in rows if row["mask"] == "none"), None)
    columns = ["batch, heads, tokens, size", "mask", "attend", "SDPA", "attend / SDPA"]
    if plain:
        columns += ["visible pairs", "attend / visible share of attend without a mask"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        ours, theirs = row["ms"]["attend"], row["ms"]["sdpa"]
        cells = [f"{tuple(row['shape'])}", row["mask"], f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"]
        if plain:
            visible = row["visible pairs"]
            cells += [f"{visible:.2f}", f"{ours / (visible * plain):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_packed() -> str:
    """Milliseconds of packed documents, and their ratio to those of the same number of tokens in a batch."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text()).get("packed", [])
    if not rows:
        return NOT_MEASURED
    lines = [
        "| head size | mask | | batch of 32 x 512 | 8 documents of 512 | ratio | 8 documents of 100 to 1000 | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        for way in ("forward", "with backward"):
            ms = row[f"{way}, ms"]
            ratios = (f"{ms[name]:.2f} | {ms[name] / ms['batch']:.2f}" for name in ("8 x 512", "100 to 1000"))
            lines.append(f"| {row['head size']} | {mask} | {way} | {ms['batch']:.2f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def gpu_decoding() -> str:
    """Microseconds of decoding as a Python call and as a CUDA graph, one row per problem."""
    table = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())
    lines = [
        "| queries | keys | Python loop, median | ratio | Python loop, best | ratio | CUDA graph | ratio | reading |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table["decoding"]:
        cells = []
        for how in ("as called, ms", "as called at best, ms", "as a graph, ms"):
            ours, theirs = row[how]["attend"], row[how]["sdpa"]
            cells.append(f"{1e3 * ours:.0f}, {1e3 * theirs:.0f} | {ours / theirs:.2f}")
        keys = f"{tuple(row['key'])}{', padded' if row['padding'] else ''}"
        lines.append(f"| {tuple(row['query'])} | {keys} | {' | '.join(cells)} | {1e3 * row['bytes_ms']:.0f} |")
    return "\n".join(lines)


def layers() -> str:
    """Ratios to torch.nn.MultiheadAttention, one table per computation, one row per layer, one column per problem."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "layers.json").read_text())["rows"]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    tables = []
    for asked in dict.fromkeys(row["asked"] for row in rows):
        lines = [f"| {asked} | " + " | ".join(problems) + " |", "|---|" + "---|" * len(problems)]
        of_layers: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["asked"] == asked:
                of_layers.setdefault(row["layer"], {})[row["problem"]] = row["ratio"]
                of_layers.setdefault("torch / torch", {}).setdefault(row["problem"], row["A/A"])
        again = of_layers.pop("torch / torch")
        for layer, ratios in {**of_layers, "torch / torch": again}.items():
            cells = (f"{ratios[p]:.2f}" if p in ratios else "" for p in problems)
            lines.append(f"| {layer} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def models() -> str:
    """Ratios to the model with SDPA, one row per batch."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())["rows"]
    names = ("eager", "registered", "observed", "A/A")
    lines = ["| sentences x tokens | eager | registered | observed | SDPA / SDPA |", "|---|---|---|---|---|"]
    for row in rows:
        if "observed" in row:
            batch = " x ".join(map(str, row["shape"])) + (", padded" if row["padded"] else "")
            lines.append(f"| {batch} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")
    return "\n".join(lines)


def monitor() -> str:
    """Milliseconds of a training step, on a GPU and on two cores."""
    gpu = json.loads((ROOT / "benchmarks" / "results" / "monitor_gpu.json").read_text())["rows"]
    cpu = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())["rows"]
    lines = [
        "| training step of | batch x tokens | plain, ms | monitored, ms | ratio | mean at default interval, ms | "
        "ratio | plain / plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in gpu:
        ms, batch = row["ms"], " x ".join(map(str, row["batch"]))
        looked, default = f"{row['looked at / plain']:.2f}", f"{row['by default / plain']:.3f}"
        lines.append(
            f"| {row['model']}, H200 | {batch} | {ms['plain']:.1f} | {ms['looked at']:.1f} | {looked} | "
            f"{ms['by default, mean']:.1f} | {default} | {row['A/A']:.2f} |"
        )
    for row in cpu:
        if "looked at" in row:
            ms, batch = row["ms"], " x ".join(map(str, row["shape"]))
            looked = f"{ms['plain']:.0f} | {ms['looked at']:.0f} | {row['looked at']:.2f}"
            lines.append(f"| GPT-2 small, two cores, float32 | {batch} | {looked} | | | {row['A/A']:.2f} |")
    return "\n".join(lines)


def dynamics() -> str:
    """Ratios of a step to one call of SDPA, one row per cloud."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "dynamics.json").read_text())["rows"]
    names = ("rms_norm", "zca", "rms_norm, observed", "A/A")
    lines = [
        "| tokens x dimension | rms_norm | zca | rms_norm, recording | SDPA / SDPA |",
        "|---|" + "---|" * len(names),
    ]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {row['tokens']} x {row['dimension']} | {cells} |")
    return "\n".join(lines)


def dynamics_gpu() -> str:
    """Milliseconds and ratios of a step to one plain attention call on a GPU, one row per cloud."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "dynamics_gpu.json").read_text())["rows"]
    names = ("sphere", "layer_norm", "zca", "sphere, observed", "plain again")
    lines = [
        "| tokens x dimension | precision | SDPA, ms | sphere | layer_norm | zca | sphere, recording | SDPA / SDPA | "
        "TFLOP/s of sphere | TFLOP/s of SDPA |",
        "|---|---|---|" + "---|" * (len(names) + 2),
    ]
    for row in rows:
        cells = " | ".join(f"{row['ratios'][name]:.2f}" for name in names)
        plain, rate = row["ms"][row["plain"]], row["rate"]
        lines.append(
            f"| {row['tokens']} x {row['dimension']} | {row['precision']} | {plain:.1f} | {cells} | "
            f"{rate['sphere']:.0f} | {rate[row['plain']]:.0f} |"
        )
    return "\n".join(lines)


def findings() -> str:
    """Verdicts of the probe with values, 95 % confidence intervals and counts, one column per model."""
    return _findings(row for row in _runs() if README not in row["run"])


def findings_of_texts() -> str:
    """Verdicts on the models that read two texts, the default one and descriptions of packages, one column per run."""
    twice = [row["run"].removesuffix(README) for row in _runs() if README in row["run"]]
    return _findings(row for row in _runs() if row["run"].removesuffix(README) in twice)


def findings_by_bound() -> str:
    """Verdicts and numbers of heads or layers with other bounds than ±0.05, one column per model."""
    rows = [row for row in _runs() if README not in row["run"] and "bounds" in row]
    lines = [
        "| prediction | bound | " + " | ".join(row["run"] for row in rows) + " |",
        "|---|---|" + "---|" * len(rows),
    ]
    none = ["–", 0, 0]
    for prediction, bounds in rows[0]["bounds"].items():
        if all(row["bounds"].get(prediction, {}).get("0.05", none)[0] in ("–", "not applicable") for row in rows):
            continue
        for bound in bounds:
            each = [row["bounds"].get(prediction, {}).get(bound, none) for row in rows]
            cells = [v if v in ("–", "not applicable") else f"{v}, {one}/{other}" for v, one, other in each]
            lines.append(f"| {prediction} | {bound} | {' | '.join(cells)} |")
    return "\n".join(lines)


README = "-readmes"


def _runs() -> list[dict]:
    rows: list[dict] = json.loads((ROOT / "benchmarks" / "results" / "findings.json").read_text())["rows"]
    return sorted(rows, key=lambda row: [known["name"] for known in rows].index(row["name"]))


def _findings(chosen: Iterable[dict]) -> str:
    rows = list(chosen)
    lines = ["| prediction | " + " | ".join(row["run"] for row in rows) + " |", "|---|" + "---|" * len(rows)]
    for prediction in rows[0]["claims"]:
        cells = []
        for row in rows:
            claim = row["claims"].get(prediction)
            if claim is None:
                cells.append("–")
                continue
            parts = [claim["verdict"]]
            if claim["value"] is not None:
                low, high = claim.get("low"), claim.get("high")
                interval = "" if low is None or low == high else f" [{low:.2f}, {high:.2f}]"
                null = "" if claim["null"] is None else f", null {claim['null']:.2f}"
                parts.append(f"{claim['value']:.2f}{interval}{null}")
            if claim["judged"]:
                counts = "" if claim["verdict"] == "described" else f"{claim['supported']}/{claim['refuted']} of "
                parts.append(f"{counts}{claim['judged']}")
            cells.append("<br>".join(parts))
        lines.append(f"| {prediction} | " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("-0.00", "0.00")


def probe() -> str:
    """Time of the probe relative to a plain pass on one core, one column per model."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "probe.json").read_text())["rows"]
    names = [f"{row['model']}, {' x '.join(map(str, row['batch']))} tokens" for row in rows]
    lines = ["| time relative to a plain pass, one core | " + " | ".join(names) + " |", "|---|" + "---|" * len(rows)]
    for name in ("all predictions", "events alone", "plain again"):
        lines.append(f"| {name} | " + " | ".join(f"{row['ratios'][name]:.2f}" for row in rows) + " |")
    for name in rows[0]["events and one prediction"]:
        cells = (f"{row['events and one prediction'][name]:.2f}" for row in rows)
        lines.append(f"| events and {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def probe_stages() -> str:
    """Seconds of CPU time of the stages of whole runs, one row per model."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "probe.json").read_text())["rows"]
    stages = {"model": "pass of the model", "matched": "20 matched draws", "judging": "judging"}
    lines = [
        "| run | " + " | ".join(f"{stage}, s" for stage in stages.values()) + " | judging / measuring |",
        "|---|" + "---|" * (len(stages) + 1),
    ]
    for row in rows:
        seconds = row["stages"]
        share = seconds["judging"] / sum(seconds[name] for name in stages if name != "judging")
        cells = " | ".join(f"{seconds[name]:.0f}" for name in stages)
        lines.append(f"| {row['model']}, {row['tokens of a run']:,} tokens | {cells} | {share:.2f} |")
    return "\n".join(lines)


def probe_gpu() -> str:
    """Time of the probe relative to a plain pass on a GPU, one row per batch."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "probe_gpu.json").read_text())["rows"]
    lines = [
        "| batch, sequences x tokens | plain pass, ms | events alone | all predictions | plain again | peak, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "ratios" in row:
            cells = (f"{row['ratios'][name]:.2f}" for name in ("events alone", "all predictions", "plain again"))
            batch = " x ".join(map(str, row["batch"]))
            lines.append(f"| {batch} | {row['ms']['plain']:.0f} | {' | '.join(cells)} | {row['GiB at most']:.1f} |")
        else:
            lines.append(
                f"\nMeasuring {row['tokens with merging']:,} tokens in successive batches, with all predictions, takes "
                f"{row['seconds']:.0f} s and {row['GiB at most']:.1f} GiB."
            )
    return "\n".join(lines)


def ring() -> str:
    """Processor seconds of a ring of processes and of one process with the whole sequence, one row per case."""
    table = json.loads((ROOT / "benchmarks" / "results" / "ring.json").read_text())
    lines = [
        "| processes | parts | mask | one process, s | slowest of the ring, s | processes x slowest / one |",
        "|---|---|---|---|---|---|",
    ]
    for row in table["rows"]:
        mask = "causal" if row["causal"] else "full"
        lines.append(
            f"| {row['processes']} | {row['placement']} | {mask} | {row['whole']:.2f} | {row['seconds']:.2f} | "
            f"{row['ratio']:.2f} |"
        )
    return "\n".join(lines)


PROBE_COST = ROOT / "benchmarks" / "results" / "probe_cost_gpu.json"


def probe_cost() -> str:
    """Microseconds of a token and a layer of the probe on a GPU, and those of the cost model, one row per shape."""
    if not PROBE_COST.is_file():
        return NOT_MEASURED
    table = json.loads(PROBE_COST.read_text())
    if not table["coefficients"]:
        return NOT_MEASURED
    lines = [
        "| width | heads, key heads | feed-forward | layers | batch | microseconds | predicted / measured | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in [*sorted(table["rows"], key=lambda row: row["use"]), *_large_models(table)]:
        lines.append(
            f"| {row['D']} | {row['h']}, {row['h_k']} | {row['wide']} | {row['layers']} | {row['rows']} x {row['n']} | "
            f"{row['microseconds']:.2f} | {row['ratio']:.2f} | {row['use']} |"
        )
    cells = ", ".join(f"{name} {value:.2g}" for name, value in table["coefficients"].items() if value)
    host = 1e3 * table["host"]
    return "\n".join(
        [*lines, "", f"{table['device']}. Fitted seconds: {cells}; {host:.0f} ms of the host for a layer."]
    )


def _large_models(table: dict) -> Iterable[dict]:
    """Rows of the models of 1 and 8 billion weights, in the batches that a GPU reads."""
    for name in ("1 B", "8 B"):
        row = table[name]
        if row.get("ratio"):
            batches = row.get("large batches", ())
            tokens = batches[0]["tokens"] if batches else row["rows"] * row["n"]
            seconds = row.get("seconds of a large batch", sum(batch["seconds"] for batch in batches))
            cost = {"microseconds": 1e6 * seconds / (tokens * row["layers"]), "rows": tokens // row["n"]}
            yield {**row, **cost, "use": f"held out, {name} weights"}


def probe_memory() -> str:
    """Memory and seconds of the probe of large models on a GPU."""
    if not PROBE_COST.is_file():
        return NOT_MEASURED
    table = json.loads(PROBE_COST.read_text())
    lines = ["| model | work | tokens | seconds | GiB beside the weights |", "|---|---|---|---|---|"]
    row = table["1 B"]
    if "seconds" in row:
        lines.append(
            f"| 1 B, {row['GiB of weights']:.1f} GiB | a run without draws and judging | {row['tokens']:,} | "
            f"{row['seconds']:.1f} | {row['GiB beside the weights']:.1f} |"
        )
    if "seconds of the draws" in row:
        lines.append(
            f"| 1 B | {row['draws']} draws of the matched baseline | | {row['seconds of the draws']:.1f} | "
            f"{row['GiB with draws']:.1f} |"
        )
    judging = {name: seconds for name, seconds in table["judging"].items() if not name.startswith("GiB")}
    if judging:
        lines.append(
            f"| 1 B | judging that run, {len(judging)} predictions | | {sum(judging.values()):.1f} | "
            f"{table['judging'].get('GiB beside the statistics', math.nan):.1f} |"
        )
    row = table["8 B"]
    for size in ("small", "large"):
        for number, batch in enumerate(row.get(f"{size} batches", ()), 1):
            name = f"a batch, {batch['predictions']} predictions (pass {number} of a part)"
            lines.append(
                f"| 8 B, {row['GiB of weights']:.1f} GiB | {name} | {batch['tokens']:,} | {batch['seconds']:.1f} | "
                f"{batch['GiB beside the weights']:.1f} |"
            )
    return "\n".join(lines)


def probe_memory_of_parts() -> str:
    """Memory of a divided probe on a CPU against the bound, one row per shape."""
    table = json.loads((ROOT / "benchmarks" / "results" / "probe_memory.json").read_text())
    lines = [
        "| width | layers | bound, MiB | a batch, MiB | measuring and joining, MiB | judging, MiB | largest / sum | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in table["rows"]:
        cells = " | ".join(f"{row[f'MiB {name}']:.0f}" for name in ("bound", "of a batch", "measuring", "judging"))
        largest = max(row["MiB measuring"], row["MiB judging"])
        ratio = largest / (row["MiB bound"] + row["MiB of a batch"])
        lines.append(f"| {row['D']} | {row['layers']} | {cells} | {ratio:.2f} | {row['use']} |")
    return "\n".join(lines)


def probe_of_a_billion_tokens() -> str:
    """Hours of a probe of 8 billion weights and a billion tokens."""
    row = json.loads(PROBE_COST.read_text())["8 B"] if PROBE_COST.is_file() else {}
    if not row.get("ratio"):
        return NOT_MEASURED
    batches = row["large batches"]
    seconds = {
        "the cost model": row["predicted seconds of a large batch"],
        "the measured batches": sum(batch["seconds"] for batch in batches),
    }
    lines = ["| hours on | 1 GPU | 8 GPUs | 64 GPUs |", "|---|---|---|---|"]
    for name, each in seconds.items():
        hours = 1e9 / batches[0]["tokens"] * each / 3600
        lines.append(f"| by {name} | " + " | ".join(f"{hours / gpus:.1f}" for gpus in (1, 8, 64)) + " |")
    return "\n".join(lines)


FILTER_LABELS = {  # labels of the rows, by scenario if they differ; other rows have the names of the JSON file
    "gpb, 128 Gaussians or 81": ("gpb, depth 8 (128 Gaussians)", "gpb, depth 5 (81 Gaussians)"),
    "gpb, 1024 Gaussians or 729": ("gpb, depth 11 (1024 Gaussians)", "gpb, depth 7 (729 Gaussians)"),
    "gpb, 8192 Gaussians or 6561": ("gpb, depth 14 (8192 Gaussians)", "gpb, depth 9 (6561 Gaussians)"),
    "exact, the likeliest 100": ("enumerate_modes, max_histories=100",) * 2,
    "rao_blackwell, 100 particles": ("rao_blackwell_filter, 100 particles",) * 2,
    "rao_blackwell, 400 particles": ("rao_blackwell_filter, 400 particles",) * 2,
}


def filter_quality() -> str:
    """Errors, NEES and mode accuracy of filters and smoothers, one table per scenario."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "filter_quality.json").read_text())["rows"]
    tables = []
    for number, scenario in enumerate(dict.fromkeys(row["scenario"] for row in rows)):
        lines = [
            f"| {scenario} | position | velocity | NEES / 4 | mode accuracy, % | delay, steps | "
            "NEES / 4, drawn modes | log likelihood lost |",
            "|---|" + "---|" * 7,
        ]
        for row in rows:
            if row["scenario"] == scenario:
                percent = [100 * value for value in row["mode"]]
                measured = (
                    (row["position"], 3),
                    (row["velocity"], 3),
                    (row["nees"], 2),
                    (percent, 1),
                    (row["delay"], 1),
                    (row["nees drawn"], 2),
                    (row.get("lost"), 3),
                )
                cells = (f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}" if pair else "" for pair, digits in measured)
                labels = FILTER_LABELS.get(row["name"])
                lines.append(f"| {labels[number] if labels else row['name']} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


COLUMN_LABELS = {
    "filterpy, quick logpdf": "filterpy, fast logpdf",
    "torch": "torch path",
    "torch, compiled": "torch path, compiled",
    "gradlogz": "gradlogz, all fields",
}


def filters() -> str:
    """Thousands of target-steps per second, one row per problem."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "filters.json").read_text())["rows"]
    names = (
        *("filterpy", "filterpy, quick logpdf", "torch", "torch, compiled", "jax, means", "gradlogz, means"),
        *("jax, all fields", "gradlogz", "gradlogz, last step"),
    )
    lines = [
        "| thousand target-steps a second | " + " | ".join(COLUMN_LABELS.get(n, n) for n in names) + " | A/A |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for row in (row for row in rows if "rates" in row):
        rates = (row["rates"].get(name) for name in names)
        cells = ("" if rate is None else f"{rate / 1e3:.3g}" if rate < 1e6 else f"{rate / 1e3:.0f}" for rate in rates)
        lines.append(f"| {row['problem']} | " + " | ".join(cells) + f" | {row['ratios']['A/A']:.2f} |")
    return "\n".join(lines)


def filters_online() -> str:
    """Microseconds of a step, one row per problem; filterpy where it has the filter."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "filters_online.json").read_text())["rows"]
    rows = [row for row in rows if "microseconds" in row]
    names = tuple(rows[0]["microseconds"])
    heads = " | ".join(COLUMN_LABELS.get(n, n) for n in names)
    lines = [f"| microseconds a step | {heads} | A/A |", "|---|" + "---|" * (len(names) + 1)]
    for row in rows:
        cells = (f"{row['microseconds'][name]:.0f}" if name in row["microseconds"] else "" for name in names)
        lines.append(f"| {row['problem']} | " + " | ".join(cells) + f" | {row['ratios']['A/A']:.2f} |")
    return "\n".join(lines)


def filters_own_intervals() -> str:
    """Milliseconds of a step of many targets, with one dt for all and one for each."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "filters_online.json").read_text())["rows"]
    (row,) = [row for row in rows if "milliseconds" in row]
    times, ratios = row["milliseconds"], row["ratios"]
    return "\n".join(
        (
            "| milliseconds a step | one dt | own dt | ratio | A/A |",
            "|---|---|---|---|---|",
            f"| {row['problem']} | {times['one dt']:.1f} | {times['own dt']:.1f} | {ratios['own dt']:.1f} "
            f"| {ratios['A/A']:.2f} |",
        )
    )


def smoothers() -> str:
    """Milliseconds of smoothers and fits, one row per alternative of each problem."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "smoothers.json").read_text())["rows"]
    lines = ["| problem | | milliseconds | ratio to gradlogz |", "|---|---|---|---|"]
    for row in rows:
        for name, time in row["milliseconds"].items():
            ratio = row["ratios"].get(name)
            cell = f"1 (A/A {row['ratios']['A/A']:.2f})" if ratio is None else f"{ratio:.2f}"
            label = COLUMN_LABELS.get(name, name) if row["problem"].startswith("smoothing") else name
            lines.append(f"| {row['problem']} | {label} | {time:.3g} | {cell} |")
    return "\n".join(lines)


def regime_switching() -> str:
    """Seconds of maximum likelihood of two models with regimes."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "regime_switching.json").read_text())["rows"]
    lines = ["| model | gradlogz, s | A/A | statsmodels, s | pull request 2921, reported, s |", "|---|---|---|---|---|"]
    for row in rows:
        ours, theirs = row["seconds"]["gradlogz"], row["seconds"].get("statsmodels", "")
        lines.append(f"| {row['problem']} | {ours} | {row['A/A']:.2f} | {theirs} | {row['reported']:.0f} |")
    return "\n".join(lines)


def filters_gpu() -> str:
    """Millions of target-steps per second, CUDA kernel and torch path, one row per filter."""
    table = json.loads((ROOT / "benchmarks" / "results" / "filters_gpu.json").read_text())
    rows = table["rows"] + table["gradients"]
    asked = ("all fields", "means and modes", "last step", "one step", "gradients")
    heads = ("all fields", "means and mode probabilities", "last step", "one step", "gradients")
    filters: dict[tuple[str, int, str], dict[tuple[str, str], dict]] = {}
    for row in rows:
        filters.setdefault((row["filter"], row["modes"], row["dtype"]), {})[row["asked"], row["path"]] = row
    lines = [
        "| million target-steps a second, CUDA kernel / torch path | " + " | ".join(heads) + " | A/A |",
        "|---|" + "---|" * (len(asked) + 1),
    ]
    for (method, modes, dtype), measured in filters.items():
        pairs = [
            [measured[name, path]["rate"] for path in ("fused", "torch") if (name, path) in measured] for name in asked
        ]
        cells = (" / ".join(f"{rate / 1e6:.{0 if rate > 1e8 else 1}f}" for rate in pair) for pair in pairs)
        again = max((row["A/A"] for row in measured.values() if "A/A" in row), key=lambda ratio: abs(ratio - 1))
        lines.append(f"| {method}, {modes} modes, {dtype} | " + " | ".join(cells) + f" | {again:.2f} |")
    return "\n".join(lines)


def filters_in_time_gpu() -> str:
    """Milliseconds of one series of a million steps in blocks of time, one row per filter and size of blocks."""
    table = json.loads((ROOT / "benchmarks" / "results" / "filters_gpu.json").read_text())
    lines = [
        "| filter | steps of a block | steps before it | ms | A/A | repairs | largest difference of means / sigma |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['filter']}, {row['modes']} modes | {row['block']} | {row['overlap']} | {row['milliseconds']:.1f} |"
        f" {row['A/A']:.2f} | {row['repairs']} | {row['difference']:.0e} |"
        for row in table["in time"]
    ]
    return "\n".join(lines)


# Methods of contrastive_gpu.py in the order of the columns.
CONTRASTIVE_METHODS = (
    "gradlogz",
    "gradlogz, other tiling",
    "compiled",
    "chunked",
    "row blocks",
    "siglip-kernel",
    "cut-cross-entropy",
    "cut-cross-entropy, exact",
    "liger",
    "inf-cl",
    "open_clip",
)
# Milliseconds that a library reports for another GPU.
PUBLISHED = {("siglip", 65_536, 768): "siglip-kernel 46.9 to 48.8 (GH200) [avocardio26]"}


def contrastive() -> str:
    """Ratios and memory of losses on a CPU, one row per loss and size."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "contrastive.json").read_text())["rows"]
    names = ("gradlogz / dense", "gradlogz / compiled", "dense / dense", "MiB dense", "MiB gradlogz")
    lines = ["| loss | size | dense, ms | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{row[name]:.2f}" if name in row else "" for name in (*names[:2], "A/A")]
        cells += [str(row.get(name, "")) for name in names[3:]]
        size = f"{row['pairs']} x {row['dimension']}"
        lines.append(f"| {row['loss']} | {size} | {row['dense ms']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _contrastive_gpu_cells(quantity: str, digits: int) -> list[str]:
    """One quantity of every loss and size, one column per method."""
    table = json.loads((ROOT / "benchmarks" / "results" / "contrastive_gpu.json").read_text())
    rows = [row for row in table["rows"] if "loss" in row]
    for row in rows:  # the fastest of the other tilings, which has its label in its name
        for label in [name for name in row["ms"] if name.startswith("gradlogz, ")]:
            for values in (row["ms"], row["MiB"]):
                values["gradlogz, other tiling"] = values[label]
    names = [name for name in CONTRASTIVE_METHODS if any(name in row["ms"] for row in rows)]
    published = quantity == "ms"
    heads = ["loss", "size", *names, *(["published"] if published else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        loss, size = row["loss"], f"{row['vectors']} x {row['dimension']}"
        cells = [f"{row[quantity][name]:.{digits}f}" if name in row[quantity] else "" for name in names]
        if published:
            cells.append(PUBLISHED.get((loss, row["vectors"], row["dimension"]), ""))
        lines.append(f"| {loss} | {size} | {' | '.join(cells)} |")
    return lines


def contrastive_gpu() -> str:
    """Milliseconds of losses on a GPU, one row per loss and size and one column per method."""
    return "\n".join(_contrastive_gpu_cells("ms", 2))


def contrastive_gpu_memory() -> str:
    """MiB of losses on a GPU, as contrastive_gpu."""
    return "\n".join(_contrastive_gpu_cells("MiB", 0))


def _rates(counts: dict[str, int]) -> str:
    """Percentages supported and refuted, of the rows or models that were judged."""
    judged = sum(number for verdict, number in counts.items() if verdict != "not applicable")
    if not judged:
        return "–"
    return " / ".join(f"{100 * counts.get(verdict, 0) / judged:.0f}" for verdict in ("supported", "refuted"))


def probe_coverage() -> str:
    """Shares of the intervals of samples that contain the value of the whole corpus, by quantity."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "probe_coverage.json").read_text())["rows"]
    lines = ["| quantity | " + " | ".join(f"{r['samples']} samples of {r['tokens']:,} tokens" for r in rows) + " |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for name in rows[0]["covered"]:
        prediction, quantity = name.split(" / ", 1)
        shares = [row["covered"].get(name) for row in rows]
        cells = ["–" if each is None else f"{each[0] / each[1]:.2f}" for each in shares]
        lines.append(f"| `{prediction}`: {quantity} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def probe_errors() -> str:
    """Percentages of heads or layers of random models that support and that refute a claim, by family."""
    table = json.loads((ROOT / "benchmarks" / "results" / "probe_calibration.json").read_text())
    families = [name for name in table["counts"] if name.startswith("random: ")]
    lines = [
        "| claim | "
        + " | ".join(name.removeprefix("random: ") for name in families)
        + " | models, all families | models of each family |"
    ]
    lines.append("|---" * (len(families) + 3) + "|")
    for claim in (name for name in _with_beside(table) if name in table["counts"][families[0]]):
        each = [table["counts"][family][claim] for family in families]
        models: dict[str, int] = {}
        for counts in each:
            models = {
                name: models.get(name, 0) + counts["models"].get(name, 0) for name in {*models, *counts["models"]}
            }
        cells = [_rates(counts["rows"]) for counts in each]
        of_models = "–" if claim in BESIDE.values() else _rates(models)
        lines.append(f"| {_code(claim)} | " + " | ".join([*cells, of_models, str(_models(each))]) + " |")
    return "\n".join(lines)


def _models(counts: Iterable[dict]) -> int:
    """Smallest number of models behind some counts."""
    return min(sum(each["models"].values()) for each in counts)


def _with_beside(table: dict) -> list[str]:
    """Names of claims, of what is counted beside them, and of all claims that random models should not decide."""
    names = [name for claim in table["claims"] for name in (claim, BESIDE.get(claim, claim))]
    return [*dict.fromkeys(names), ANY]


def _code(claim: str) -> str:
    name, comma, rest = claim.partition(",")
    return f"`{name}`{comma}{rest}" if claim != ANY else "any of the first kind"


BESIDE = {
    "qk_geometry": "qk_geometry, unrelated", "link": "link, rotation null",
    "gaussian_measure": "gaussian_measure, compatible",
}  # fmt: skip
ANY = "any of these"


class Effect(NamedTuple):
    """A planted effect: its name in the benchmark, the meaning of its strength, and the models."""

    planted: str
    strength: str
    models: str


TIED = "cosine of OV and transposed QK matrices"
MATRICES = "GPT-2s of two layers and width {}, 64 documents of 40 tokens"
ALIKE = "GPT-2s of two layers and width 256, 128 documents of 60 tokens"
FOLLOWING = "cosine of W_q and W_k, which are scaled with a power of the covariance of the tokens"
SMALL = "GPT-2s of two layers and width 64, 64 documents of 48 tokens"
AXES = "scale of W_q, which is independent of W_k and, like it, on the principal axes of the tokens (not selective)"
LAYER = "one layer with four heads of 16 dimensions, {} documents of 128 tokens"
EFFECTS = {
    "tie": Effect("tied, width 256", TIED, MATRICES.format(256)),
    "ascent": Effect("tied, width 256", TIED, MATRICES.format(256)),
    "expansion": Effect("tied, width 256", TIED, MATRICES.format(256)),
    "qk_geometry": Effect("following", FOLLOWING, ALIKE),
    "entropy": Effect("matching", "cosine of W_q and W_k", ALIKE),
    "gaussian_measure": Effect(
        "heavy",
        "inverse of the degrees of freedom of Student's t distribution of the keys (0: Gaussian)",
        "independent keys of 32 dimensions, logit variance 2, 128 documents of 256 tokens",
    ),
    "pair_energy": Effect(
        "attending", "step size", "ALBERTs of one head that satisfy the theorem, 64 documents of 40 tokens"
    ),
    "dropped_covariance": Effect(
        "unsure",
        "decrease of the logit of the next token for one standard deviation of the log variance of values",
        "models of one layer, 128 documents of 40 tokens",
    ),
    "feed_forward_hopfield": Effect(
        "maps", "cosine of output and reading vectors of hidden units", MATRICES.format(32)
    ),
    "link": Effect("linked", "correlation of logits with those of the linear link", LAYER.format(256)),
}


def _planted(table: dict, claim: str, planted: str) -> dict[float, dict]:
    """Counts of a claim by strength of a planted effect, in ascending order."""
    prefix = f"planted: {planted}: "
    by_strength = {float(n.removeprefix(prefix)): c[claim] for n, c in table["counts"].items() if n.startswith(prefix)}
    return dict(sorted(by_strength.items()))


def probe_power() -> str:
    """Percentages of heads or layers that support and that refute a claim, and median values, by planted effect."""
    table = json.loads((ROOT / "benchmarks" / "results" / "probe_calibration.json").read_text())
    narrow = {name: Effect("tied, width 32", TIED, MATRICES.format(32)) for name in ("tie", "ascent", "expansion")}
    head = "strength: supported / refuted, in % of heads or layers; in % of models (median value)"
    lines = [f"| claim | planted effect; models | {head} |", "|---|---|---|"]
    others = [
        ("qk_geometry", Effect("alike", "cosine of W_q and W_k, unrelated to the tokens", ALIKE)),
        ("entropy", Effect("axes", AXES, SMALL)),
    ]
    for claim, effect in [*EFFECTS.items(), *others, *narrow.items()]:
        known = _planted(table, claim, effect.planted)
        cells = [
            f"{s:g}: {_rates(c['rows'])}; {_rates(c['models'])} ({c['median value']:.3g})" for s, c in known.items()
        ]
        models = f"{_models(known.values())} of each strength: {effect.models}"
        lines.append(f"| `{claim}` | {effect.strength}; {models} | {'<br>'.join(cells)} |")
        if claim in BESIDE:
            sides = _planted(table, BESIDE[claim], effect.planted)
            cells = [f"{strength:g}: {_rates(counts['rows'])}" for strength, counts in sides.items()]
            sign = " (above / below)" if claim == "link" else " (heads / –)"
            lines.append(f"| {_code(BESIDE[claim])}{sign} | as above | {'<br>'.join(cells)} |")
    return "\n".join(lines)


def power_sentences() -> dict[str, str]:
    """The declared power of each claim, from the results of the benchmark."""
    table = json.loads((ROOT / "benchmarks" / "results" / "probe_calibration.json").read_text())
    sentences = {}
    for claim, effect in EFFECTS.items():
        known = _planted(table, claim, effect.planted)
        shares = "; ".join(f"{s:g}: {_rates(c['rows'])} ({_rates(c['models'])})" for s, c in known.items())
        sentences[claim] = (
            "Percentages of heads or layers (in brackets: of models) that support / refute the claim, by planted "
            f"effect ({effect.strength}): {shares}. "
            f"Models: {_models(known.values())} of each strength, {effect.models}."
        )
    return sentences


POWER = ROOT / "src" / "gradlogz" / "probing" / "planted_power.json"


def with_interval(entry: dict[str, float], form: str) -> str:
    """Value and 95 % confidence interval."""
    return f"{entry['value']:{form}} ({entry['low']:{form}} to {entry['high']:{form}})"


def aircraft() -> str:
    """Filters on real aircraft that were not used for fitting, with 95 % intervals over flights."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "aircraft.json").read_text())["runs"]
    names = {"gradlogz": "gradlogz track", "cv": "constant-velocity Kalman filter", "filterpy": "filterpy's IMM"}

    lines = ["| source | quantity | " + " | ".join(names.values()) + " |", "|---|---|" + "---|" * len(names)]
    for run in runs:
        filters = run["filters"]
        for quantity in filters["gradlogz"]:
            form = {"nis_coverage": ".1%", "log_score": ".2f"}.get(quantity, ".0f")
            label = {"nis_coverage": "NIS in 95 % band", "log_score": "log score, nats"}.get(quantity)
            label = label or f"prediction error after {quantity.split('_')[1]} s, m"
            cells = (with_interval(filters[name][quantity], form).replace("%", " %") for name in names)
            lines.append(f"| {run['source']} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def aircraft_differences() -> str:
    """Differences of the other filters from track on the same detections."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "aircraft.json").read_text())["runs"]
    lines = ["| source | quantity | less the Kalman filter | less filterpy's IMM |", "|---|---|---|---|"]
    for run in runs:
        both = run["differences"]
        for quantity in sorted(both["cv"], key=lambda name: name != "log_score"):
            form = "+.2f" if quantity == "log_score" else "+.0f"
            label = "log score, nats" if quantity == "log_score" else f"error after {quantity.split('_')[1]} s, m"
            entries = (both[name][quantity] for name in ("cv", "filterpy"))
            cells = (with_interval(entry, form) for entry in entries)
            lines.append(f"| {run['source']} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def aircraft_traffic() -> str:
    """Prediction errors of the extended Kalman filter of traffic, and of track on the same detections."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "aircraft_traffic.json").read_text())["runs"]
    ours = {"gradlogz": "`track`", "gradlogz with velocities": "`track` with velocities"}
    heads = ["mean, traffic"] + [f"{name} less traffic" for name in ours.values()] + ["median, traffic", *ours.values()]
    lines = ["| source | error after | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for run in runs:
        for key in (name for name in run if name.startswith("error_")):
            seconds = key.split("_")[1]
            cells = [with_interval(run[key], ".0f")]
            cells += [with_interval(run[f"{name} less traffic, {seconds} s"], "+.0f") for name in ours]
            cells += [f"{run[f'median_{key}{suffix}']:.0f}" for suffix in ("", *(f", {name}" for name in ours))]
            lines.append(f"| {run['source']} | {seconds} s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def history() -> str:
    """Values of chosen benchmarks over the commits that changed them."""
    series = json.loads((ROOT / "benchmarks" / "results" / "history.json").read_text())
    lines = ["| quantity | values, oldest first | commit and date of the last |", "|---|---|---|"]
    for name, rows in series.items():
        values = " → ".join(f"{row['value']:.3g}" for row in rows)
        lines.append(f"| {name} | {values} | {rows[-1]['commit']}, {rows[-1]['date']} |")
    return "\n".join(lines)


def measures() -> str:
    """Ratios of the methods of measures to the usual way to compute the same."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "measures.json").read_text())["rows"]
    lines = ["| quantity | size | compared with | time / time of the other | A/A |", "|---|---|---|---|---|"]
    lines += [f"| {r['what']} | {r['size']} | {r['alternative']} | {r['ratio']:.2f} | {r['A/A']:.2f} |" for r in rows]
    return "\n".join(lines)


def import_time() -> str:
    """Seconds of imports and of help, each in a new process."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "import_time.json").read_text())["rows"]
    lines = ["| process | seconds |", "|---|---|"]
    names = {"A/A": "import torch, again"}
    return "\n".join(lines + [f"| {names.get(row['what'], row['what'])} | {row['seconds']:.2f} |" for row in rows])


TABLES = {
    "history": history,
    "measures": measures,
    "import time": import_time,
    "aircraft": aircraft,
    "aircraft differences": aircraft_differences,
    "aircraft traffic": aircraft_traffic,
    "performance": performance,
    "cpu": cpu,
    "gpu": gpu,
    "layers": layers,
    "gpu ratios": gpu_without_and_through,
    "gpu training": gpu_training,
    "gpu masks": gpu_masks,
    "gpu packed": gpu_packed,
    "gpu decoding": gpu_decoding,
    "models": models,
    "monitor": monitor,
    "dynamics": dynamics,
    "dynamics gpu": dynamics_gpu,
    "findings": findings,
    "findings of texts": findings_of_texts,
    "findings by bound": findings_by_bound,
    "probe": probe,
    "probe stages": probe_stages,
    "probe gpu": probe_gpu,
    "ring": ring,
    "probe cost": probe_cost,
    "probe memory": probe_memory,
    "probe memory of parts": probe_memory_of_parts,
    "probe of a billion tokens": probe_of_a_billion_tokens,
    "probe coverage": probe_coverage,
    "probe errors": probe_errors,
    "probe power": probe_power,
    "filters": filters,
    "filters online": filters_online,
    "filters own intervals": filters_own_intervals,
    "smoothers": smoothers,
    "regime switching": regime_switching,
    "filters gpu": filters_gpu,
    "filters in time gpu": filters_in_time_gpu,
    "filter quality": filter_quality,
    "contrastive": contrastive,
    "contrastive gpu": contrastive_gpu,
    "contrastive gpu memory": contrastive_gpu_memory,
}


def filled(page: str) -> str:
    """Return the page with its tables written between their markers."""
    for name, table in TABLES.items():
        begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        if begin not in page:
            continue
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
    POWER.write_text(json.dumps(power_sentences(), indent=1) + "\n")
