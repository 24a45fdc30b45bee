"""Parts of a corpus on the disk: files of batches, and the parts of the work that read them.

    chunk n of group g     CHUNK batches of one group, as the corpus is read
    part g.s               chunks s, s + S, s + 2 S, ... of group g           S parts of each group, whatever the corpus
    baseline g.s           the rows of chunks that the random-weights baseline reads, likewise
    draws                  windows of each draw of the matched baseline

A part belongs to one group of documents, so that its matrices are those of one group: an eighth of all. The number of
parts, and thereby that of files with matrices, does not grow with the corpus. Nothing depends on the machine.

Read next: divided_pass.py (what is computed), ../corpus/batching.py (batches and groups).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ...engine.work_folder import INPUTS, WorkFolder
from ..corpus.batching import Batch, Batches, Report
from ..corpus.inputs import Inputs
from ..corpus.read_documents import ReadDocuments, documents_in, joined_documents
from ..measurement import Measurement
from ..passes.baseline_rows import BaselineRows
from ..passes.matched_draws import Window, dealt, with_windows
from ..statistics import GROUPS

CHUNK = 4  # batches of a file
PARTS = 64  # default number of parts of the text
INDEX = "index"  # the file that lists the others


class DividedPass(NamedTuple):
    """Options of a pass on which its results depend, beside the model."""

    tokens: int | None
    length: int | None
    seed: int
    baseline: float
    draws: int
    parts: int = PARTS


class DividedOutcome(NamedTuple):
    """A measurement of the parts that are finished, and the errors of those that failed.

    measured: None if so little is finished that nothing can be judged. finished, total: numbers of parts.
    """

    measured: Measurement | None
    failures: dict[str, str]
    interrupted: bool
    finished: int
    total: int


class Part(NamedTuple):
    """Files of batches that one item of work reads.

    group: group of the documents. numbers: those of the draws that read the batches. hash: that of a least row.
    """

    files: list[str]
    group: int = 0
    numbers: tuple[int, ...] = ()
    hash: int = 0


class CorpusParts(NamedTuple):
    """The parts of a corpus, by id, and what is known of it without a model.

    text, baseline: parts of groups; least: one row of each group that has no chosen row; draws: windows of draws.
    documents: those of each part of the text.
    """

    first: str
    text: dict[str, Part]
    baseline: dict[str, Part]
    least: dict[str, Part]
    draws: dict[str, Part]
    documents: dict[str, ReadDocuments]
    windows: list[Window]
    report: Report


def corpus_parts(
    place: WorkFolder, reading: Batches | Inputs, *, parts: int, baseline: float, draws: int
) -> CorpusParts:
    """Return the parts of a corpus, whose batches are read into files unless an earlier call did so.

    parts: number of parts of the text, at most; draws: that of the draws of the matched baseline, 0 for none.
    """
    written = place.finished(INPUTS)
    if INDEX in written:
        known = place.read(INDEX, written[INDEX])
        if isinstance(known, CorpusParts) and {path.name for path in written.values()} >= _files_of(known):
            return known
    files = _Files(place, max(1, parts // GROUPS))
    sample, windows = BaselineRows(baseline), list[Window]()
    for number, chunk in enumerate(_chunks(reading)):
        if not number:
            files.write("first", chunk[:1])
        files.add("text", chunk)
        chosen = [rows for batch in chunk if (rows := sample.add(batch)) is not None]
        if chosen:
            files.add("baseline", chosen)
        if draws:
            for batch in chunk:
                windows = with_windows(windows, batch, draws)
    least = {
        f"least-{group}": Part([files.write(f"least-{group}", [row])], group, (), number)
        for group, (number, row) in sample.least().items()
    }
    of_draws = {
        f"draws-{i:03d}": Part([files.write(f"draws-{i:03d}", batches)], 0, tuple(numbers))
        for i, (batches, numbers) in enumerate(dealt(windows, draws) if draws else ())
    }
    documents = {name: joined_documents(each) for name, each in files.documents.items()}
    kinds = (files.parts["text"], files.parts["baseline"], least, of_draws)
    index = CorpusParts(files.names["first"], *kinds, documents, windows, reading.report)
    place.write(INDEX, index, INPUTS)
    return index


def _files_of(known: CorpusParts) -> set[str]:
    """Return the names of the files that the parts of a corpus read."""
    return {known.first, *(file for each in known[1:5] for part in each.values() for file in part.files)}


def batches_in(place: WorkFolder, part: Part) -> Iterator[Batch]:
    """Yield the batches of a part, in the order of the corpus."""
    for file in part.files:
        yield from place.read(file.rpartition("-")[0], place.path / INPUTS / file)


class _Files:
    """Files of batches, and the parts to which they belong."""

    def __init__(self, place: WorkFolder, parts_of_group: int) -> None:
        self._place, self._parts = place, parts_of_group
        self._counts: dict[tuple[str, int], int] = {}
        self.names: dict[str, str] = {}
        self.parts: dict[str, dict[str, Part]] = {"text": {}, "baseline": {}}
        self.documents: dict[str, list[ReadDocuments]] = {}

    def add(self, kind: str, chunk: Sequence[Batch]) -> None:
        """Write the next chunk of a group, to the part whose turn it is."""
        group = chunk[0].group
        n = self._counts.get((kind, group), 0)
        self._counts[kind, group] = n + 1
        name = f"{kind}-{group}-{n % self._parts:04d}"
        part = self.parts[kind].setdefault(name, Part([], group))
        part.files.append(self.write(f"{kind}-{group}-chunk-{n:08d}", chunk))
        if kind == "text":
            self.documents.setdefault(name, []).extend(map(documents_in, chunk))

    def write(self, name: str, batches: Sequence[Batch]) -> str:
        """Write batches; return the name of their file."""
        self.names[name] = self._place.write(name, list(batches), INPUTS).name
        return self.names[name]


def _chunks(reading: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Yield groups of at most CHUNK consecutive batches of one group of documents."""
    for _, batches in groupby(reading, key=lambda batch: batch.group):
        chunk: list[Any] = []
        for batch in batches:
            chunk.append(batch)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
