"""States of finished parts, joined into the measurement of all.

States are read from their files as they are needed (memory mapped), and joined matrices that are large go back to the
disk, group by group: memory is bounded by the matrices of one group.

Read next: divided_pass.py (which computes the parts), ../run_probe.py (judges the measurement).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import groupby
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.state_file import Encoded, Modules
from ...engine.work_folder import JOINED, WorkFolder
from ..corpus.batching import facts_of_text
from ..corpus.read_documents import joined_documents
from ..inside.architecture import Architecture
from ..inside.embeddings import WordVectors
from ..measurement import Measurement, MergeData
from ..measurement_file import modules_of
from ..passes.baseline_rows import BaselineState, LeastState
from ..passes.extreme_tokens import ExtremeToken, greatest
from ..passes.matched_draws import by_prediction
from ..passes.nulls import baseline_name
from ..prediction import Baseline, Prediction, Probed
from ..statistics import merge
from .corpus_parts import CorpusParts, Part
from .model_source import ModelSource

State = dict[str, Any]  # {prediction: its statistics}
Join = Callable[[str, Mapping[str, State], Mapping[str, Part]], State]
LARGE = 2**28  # bytes of joined statistics of a group from which they are written to the disk


class TextState(NamedTuple):
    """Statistics of a part of the text, and its extreme tokens."""

    state: State
    extreme: list[ExtremeToken]


class ModelState(NamedTuple):
    """Architecture and word vectors of a model; of a baseline the architecture alone."""

    architecture: Architecture
    words: dict[str, WordVectors]


def in_bundle(name: str, bundle: int) -> str:
    """Return the id of a part of a bundle of predictions."""
    return name if bundle == 0 else f"{name}.{bundle}"


def joined_measurement(
    place: WorkFolder,
    source: ModelSource,
    tokenizer: Any,
    parts: CorpusParts,
    bundles: int,
    states: Mapping[str, Any],
    predictions: Sequence[Prediction],
    known: Mapping[str, Any],
) -> Measurement | None:
    """Join the states of the finished parts; None if there is no text among them, or no model.

    tokenizer: that of the model, for the text of extreme tokens. known: facts of the model.
    """
    joined = partial(_joined, place, modules_of(predictions), bundles)
    texts = _finished(parts.text, states, bundles)
    if not texts or "model" not in states:
        return None
    model: ModelState = states["model"]
    weights = _weights(states, model, "weights")
    probed = Probed(source.label, model.architecture, weights, source.seed, words=model.words)
    text_states = {in_bundle(n, i): states[in_bundle(n, i)].state for n in texts for i in range(bundles)}
    state = joined("text", text_states, texts)
    extreme = greatest(token for name in texts for token in states[name].extreme)
    documents = joined_documents([parts.documents[name] for name in texts])
    report = documents.report(parts.report)
    facts = {**known, **facts_of_text(report)}
    baseline, rows = _baseline(joined, source, parts, bundles, states, facts)
    values = [states[name] for name in parts.draws if name in states]
    reason = next((each for each in values if isinstance(each, str)), None)
    if reason is not None:
        facts["without_matched"], values = reason, []
    matched = [p for p in predictions if p.baseline == "matched"]
    draws = by_prediction((draw for each in values for draw in each), matched) if values else ({}, {})
    listed = [token.token(source.label, tokenizer) for token in extreme]
    merge_data = MergeData(documents, parts.windows, rows, {})
    return Measurement(probed, facts, state, baseline, *draws, report, listed, {}, False, merge_data)


def _weights(states: Mapping[str, Any], model: ModelState, kind: str) -> dict[str, Any]:
    names = {layer: f"{kind}-{i:04d}" for i, layer in enumerate(model.architecture.attention)}
    return {layer: states[name] for layer, name in names.items() if states.get(name) is not None}


def _finished(parts: Mapping[str, Part], states: Mapping[str, Any], bundles: int) -> dict[str, Part]:
    """Return the parts that are finished for every bundle of predictions."""
    return {name: part for name, part in parts.items() if all(in_bundle(name, i) in states for i in range(bundles))}


def _baseline(
    joined: Join,
    source: ModelSource,
    parts: CorpusParts,
    bundles: int,
    states: Mapping[str, Any],
    facts: dict[str, Any],
) -> tuple[Baseline | None, BaselineState | None]:
    """Return the random-weights baseline; if there is none, the facts say why."""
    model = states.get("baseline-model")
    if isinstance(model, str):
        facts["without_baseline"] = model
    if not isinstance(model, ModelState):
        return None, None
    chosen = _finished(parts.baseline, states, bundles)
    rows = {f"baseline-{name}": part for name, part in parts.least.items()}
    least = {
        part.group: LeastState(part.hash, reduce(or_, (states[in_bundle(name, i)] for i in range(bundles))))
        for name, part in _finished(rows, states, bundles).items()
    }
    groups = frozenset(part.group for part in chosen.values())
    measured = BaselineState(joined("baseline", states, chosen), groups, least)
    weights = _weights(states, model, "baseline-weights")
    probed = Probed(baseline_name(source.label), model.architecture, weights, source.seed)
    return Baseline(measured.state, probed), measured


def _joined(
    place: WorkFolder, modules: Modules, bundles: int, kind: str, states: Mapping[str, State], parts: Mapping[str, Part]
) -> State:
    """Merge the states of parts in the order of their ids; large ones of a group by way of the disk."""
    every: State = {}
    for bundle in range(bundles):
        groups: list[State] = [{}]
        for group, names in groupby(sorted(parts), key=lambda name: parts[name].group):
            first, *others = (states[in_bundle(name, bundle)] for name in names)
            written: Path | None = None
            for other in others:
                first = merge(first, other)
                if Encoded(first).nbytes >= LARGE:
                    name, before = f"{kind}-{group}.{bundle}", written
                    written = place.write(name, first, JOINED)
                    first = place.read(name, written, modules)
                    if before not in (None, written):
                        before.unlink()
            groups.append(first)
        state = reduce(merge, groups)
        if bundles > 1 and bundle == 0:  # the predictions with samples of tokens, which add up over groups
            name = f"{kind}-samples"
            state = place.read(name, place.write(name, state, JOINED), modules)
        every |= state
    return every
