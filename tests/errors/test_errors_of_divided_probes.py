"""What is wrong with a probe in parts, or with runs to merge, is said in a sentence that names the argument."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

from gradlogz.commands import divided_probe, merge, probe
from gradlogz.commands.checkpoint_runs import Settings
from gradlogz.commands.engine_options import EngineOptions
from gradlogz.engine.work_folder import WorkFolder
from gradlogz.probing.corpus.batching import Report
from gradlogz.probing.corpus.read_documents import ReadDocuments
from gradlogz.probing.divided.corpus_parts import DividedOutcome, Part
from gradlogz.probing.divided.divided_pass import PartWork, _check_states
from gradlogz.probing.inside.architecture import Architecture, Sublayer, SumSite
from gradlogz.probing.measurement import Measurement, MergeData
from gradlogz.probing.measurement_file import STATISTICS, kept_measurement, write_measurement
from gradlogz.probing.measurement_merge import merged
from gradlogz.probing.passes.memory_limits import check_part_memory
from gradlogz.probing.prediction import Probed
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.runs.run_folder import RUN
from support.error_form import each_of, refused
from support.merged_runs import kept_runs

FAILED = DividedOutcome(None, {"a": "b"}, False, 0, 1)
CPU = torch.device("cpu")
SITE = SumSite("m", 0, 0)
NONE = Architecture((), 8, (), {}, frozenset())
WIDE = Architecture(
    (Sublayer("m", "feed_forward", None, None, None, SITE, 0, (SITE, 0), None),), 2**24, (), {}, frozenset()
)
OPTIONS = Settings(None, 0, None, [], [], None, None, None, 0, None, 0.1, 0, False, False, 64,
                   EngineOptions(None, None, "parts", False, None), False)  # fmt: skip


@cache
def folder():
    return Path(tempfile.mkdtemp())


def damaged():
    (folder() / STATISTICS).write_bytes(b"nothing")
    return folder()


def measurement(keys, *, complete=True, left=0, seed=0):
    documents = ReadDocuments(torch.tensor(keys), torch.ones(len(keys), dtype=torch.int64), len(keys), 9)
    report = Report(len(keys), len(keys), len(keys), 9, 8, 0, 0, left, 1, 1.0, 0)
    merge_data = MergeData(documents, [], None, {"seed": seed, "draws": 0})
    return Measurement(Probed("m", NONE, {}, 0), {}, {}, None, {}, {}, report, [], {}, complete, merge_data)


def both(*measurements):
    return merged(["one", "two"], measurements)


def merge_of_kept(**options):
    one, two = kept_runs()
    return merge.command([str(one), str(two)], out=str(folder() / "out"), **options)


def merged_with_foreign_statistics():
    """The keys of the documents have another shape than those of a probe."""
    one, two = kept_runs()
    other = folder() / "foreign"
    shutil.copytree(one, other, dirs_exist_ok=True)
    measured = kept_measurement(one, [])
    documents = measured.merge_data.documents._replace(keys=torch.ones(2, 2))
    write_measurement(other, measured._replace(merge_data=measured.merge_data._replace(documents=documents)), {})
    described = json.loads((other / RUN).read_text())
    del described["files"]  # whoever changes the statistics changes their checksum
    (other / RUN).write_text(json.dumps(described))
    merge.command([str(other), str(two)], out=str(folder() / "out"))


def full(module, call):
    """A call with a disk that is too small for statistics."""
    before = module.disk_usage

    def run():
        module.disk_usage = lambda _: type("Usage", (), {"free": 1})
        try:
            return call()
        finally:
            module.disk_usage = before

    return run


def probed_to_a_full_disk():
    model, text = kept_runs()[0].parent / "model", kept_runs()[0].parent / "a.jsonl"
    words = {"text": str(text), "only": ["entropy"], "draws": 0, "baseline": 0.0, "out": str(folder() / "run")}
    return full(shutil, lambda: probe.command([str(model)], device="cpu", keep_statistics=True, **words))()


def merged_to_a_full_disk():
    return full(shutil, merge_of_kept)()


def exchanged_states():
    work = {"model": PartWork("model", Part([]))}
    _check_states(WorkFolder("probe", folder(), {}), work, {"model": "a reason"})


ERRORS = [
    (RuntimeError, "probe: --resume", "another state", exchanged_states),
    (ValueError, "merge: runs", "stopped", lambda: both(measurement([1]), measurement([2], complete=False))),
    (ValueError, "merge: runs", "sample", lambda: both(measurement([1]), measurement([2], left=4))),
    (ValueError, "merge: runs", "seed", lambda: both(measurement([1]), measurement([2], seed=5))),
    (ValueError, "merge: runs", "overlap", lambda: both(measurement([1, 2]), measurement([2]))),
    (ValueError, "merge: runs", "two or more", lambda: merge.command(["one"], out=str(folder() / "out"))),
    (ValueError, "merge: --out", "one of the runs", lambda: merge.command(["one", "two"], out="one")),
    (ValueError, "merge: runs", "no statistics", lambda: kept_measurement(folder() / "none", [])),
    (ValueError, "merge: runs", "damaged", lambda: kept_measurement(damaged(), [])),
    (ValueError, "merge: runs", "cannot be joined", merged_with_foreign_statistics),
    (ValueError, "merge: --model", "weights", lambda: merge_of_kept(model=str(kept_runs()[0].parent / "other"))),
    (ValueError, "merge: --out", "written", merged_to_a_full_disk),
    (ValueError, "probe: --keep-statistics", "written", probed_to_a_full_disk),
    (ValueError, "probe: predictions", "GiB", lambda: check_part_memory(WIDE, list(known_predictions()), CPU)),
    (ValueError, "probe: --text", "standard input", lambda: probe._check_distribution(OPTIONS._replace(text="-"))),
    (
        RuntimeError,
        "probe: --resume",
        "failed",
        lambda: divided_probe.measured_parts(FAILED, OPTIONS, Console(quiet=True)),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
