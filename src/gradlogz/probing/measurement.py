"""Record of a pass over a corpus: sufficient for all findings, without the model.

Read next: run_probe.py (measures and judges it), measurement_file.py (on disk).
"""

from typing import Any, NamedTuple

from .corpus.batching import Report
from .corpus.read_documents import ReadDocuments
from .passes.baseline_rows import BaselineState
from .passes.matched_draws import Window
from .prediction import Baseline, Probed
from .runs.judgement import Measured
from .runs.records import Token


class MergeData(NamedTuple):
    """Data beside the statistics that a merge with the measurement of another text needs.

    documents: those that were read.
    windows: those from which the draws of the matched baseline read.
    baseline: statistics of the random-weights baseline, by the rule that chose its rows.
    options: settings of the pass that must be equal, and the source of the model; JSON values by name.
    """

    documents: ReadDocuments
    windows: list[Window]
    baseline: BaselineState | None
    options: dict[str, Any]


class Measurement(NamedTuple):
    """Result of a pass over a corpus: sufficient for all findings, and mergeable with other passes.

    state: {prediction: its statistics}; baseline: the random-weights baseline with its statistics.
    matched: {prediction: its values in each draw of the matched baseline}; rescaled: those of random queries of equal
        logit variance, as differences to the model itself.
    complete: whether the corpus was read to its end.
    """

    probed: Probed
    facts: dict[str, Any]
    state: dict[str, Any]
    baseline: Baseline | None
    matched: dict[str, tuple[list[Measured], ...]]
    rescaled: dict[str, tuple[list[Measured], ...]]
    report: Report
    tokens: list[Token]
    seconds: dict[str, float]
    complete: bool
    merge_data: MergeData


def with_merge_options(measured: Measurement, options: dict[str, Any]) -> Measurement:
    """Return a measurement that is joined with those of the same options."""
    return measured._replace(merge_data=measured.merge_data._replace(options=options))
