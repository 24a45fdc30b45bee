"""A probe in parts: an engine computes them, their states are joined in the order of their ids.

    divided_measure(work, tokenizer, corpus, engine=..., folder=...)     -> Measurement, or the parts that failed

The same call continues in its folder where it stopped. States are read from their files as they are needed (memory
mapped), and joined matrices that are large go back to the disk, group by group: the memory of a worker, and that of the
judgement, is bounded by the matrices of one group.

Read next: corpus_parts.py (the parts), part_states.py (the work of one), ../run_probe.py (the pass without parts).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.engines import Engine, InProcess
from ...engine.state_file import Encoded, Modules
from ...engine.work_folder import JOINED, WorkFolder
from ...engine.work_loop import Results, run_items
from ..corpus.batching import PADDED, Batches, facts_of_text
from ..corpus.inputs import Inputs
from ..corpus.read_documents import joined_documents
from ..corpus.readers import batches_of
from ..inside.loading import Loaded, describe
from ..measurement import Joinable, Measurement
from ..measurement_file import modules_of
from ..passes.baseline_rows import BaselineState, LeastState
from ..passes.extreme_tokens import greatest
from ..passes.matched_draws import by_prediction
from ..passes.memory_limits import MOST, check_part_memory
from ..prediction import Baseline, Prediction, Probed
from ..run_probe import baseline_name, check_nulls, matched_of
from ..statistics import merge
from .corpus_parts import PARTS, CorpusParts, Part, corpus_parts
from .model_source import MODELS, ModelSource
from .part_states import ModelState, PartWork, part_state

State = dict[str, Any]  # {prediction: its statistics}
Join = Callable[[str, Mapping[str, State], Mapping[str, Part]], State]
LARGE = 2**28  # bytes of joined statistics of a group from which they are written to the disk


class DividedPass(NamedTuple):
    """Options of a pass on which its results depend, beside the model."""

    tokens: int | None
    length: int | None
    seed: int
    baseline: float
    draws: int
    parts: int = PARTS


class Outcome(NamedTuple):
    """A measurement of the parts that are finished, and the errors of those that failed.

    measured: None if so little is finished that nothing can be judged. finished, total: numbers of parts.
    """

    measured: Measurement | None
    failures: dict[str, str]
    interrupted: bool
    finished: int
    total: int


def divided_measure(
    source: ModelSource,
    loaded: Loaded,
    corpus: Iterable[Any],
    options: DividedPass,
    *,
    predictions: Sequence[Prediction],
    facts: Mapping[str, Any],
    known: Mapping[str, Any],
    folder: Path,
    engine: Engine,
    restart: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Measure a model on a corpus in parts.

    Args:
        source: the model, for workers; `loaded` is the model of this process, used for its tokenizer and its facts.
        facts: what the parts depend on; a folder of parts with other facts is refused.
        known: facts of the model for the measurement.

    Laws: tests/laws/test_a_divided_probe_is_one_probe.py, tests/faults/test_a_divided_probe_survives.py.
    """
    check_nulls(options.baseline, options.draws)
    matched = matched_of(predictions, draws=options.draws, baseline=options.baseline)
    place, modules = WorkFolder("probe", folder, facts, restart=restart), modules_of(predictions)
    with place.opened():
        parts = corpus_parts(
            place, _reading(source, loaded, corpus, options), parts=options.parts, baseline=options.baseline,
            draws=options.draws if matched else 0,
        )  # fmt: skip
        MODELS.give(source, loaded.model)
        layers = _layers(place, source, parts, predictions)
        MODELS.clear()  # workers have their own; here it is opened again as they do it, with one thread
        if isinstance(engine, InProcess):
            MODELS.give(source, loaded.model)
        items, begun = _items(parts, layers, random=options.baseline > 0), time.perf_counter()
        results = run_items(
            partial(part_state, place, source, parts.first), items, engine=engine, folder=place, call="probe",
            modules=modules, progress=progress,
        )  # fmt: skip
        MODELS.clear()
        joined = partial(_joined, place, modules)
        measured = _measurement(joined, source, loaded, parts, results, matched, {**describe(loaded.model), **known})
        if measured is not None:
            seconds, complete = {"parts": time.perf_counter() - begun}, len(results.states) == len(items)
            measured = measured._replace(seconds=seconds, complete=complete)
    return Outcome(measured, results.failures, results.interrupted, len(results.states), len(items))


def _reading(source: ModelSource, loaded: Loaded, corpus: Iterable[Any], options: DividedPass) -> Batches | Inputs:
    """Return the batches of a corpus, whose size depends on the options and not on the machine."""
    padded = PADDED * (MOST if (source.device or "").startswith("cuda") else 1)
    return batches_of(
        loaded.tokenizer, corpus, tokens=options.tokens, length=options.length, padded=padded, seed=options.seed
    )


def _layers(place: WorkFolder, source: ModelSource, parts: CorpusParts, predictions: Sequence[Prediction]) -> int:
    """Return the number of attention layers; raise if the matrices of one group do not fit into memory."""
    state = part_state(place, source, parts.first, PartWork("model", Part([])))
    assert isinstance(state, ModelState)
    check_part_memory(state.architecture, predictions, source.device)
    return len(state.architecture.attention)


def _items(parts: CorpusParts, layers: int, *, random: bool) -> dict[str, PartWork]:
    """Return the items of work by id; those of the baseline come first, so that a worker changes its model once."""
    items: dict[str, PartWork] = {}
    if random:
        items |= {name: PartWork("baseline", part, random=True) for name, part in parts.baseline.items()}
        items |= {f"baseline-{name}": PartWork("baseline", part, random=True) for name, part in parts.least.items()}
        items["baseline-model"] = PartWork("model", Part([]), random=True)
        items |= {f"baseline-weights-{i:04d}": PartWork("weights", Part([]), True, i) for i in range(layers)}
    items |= {name: PartWork("draws", part) for name, part in parts.draws.items()}
    items["model"] = PartWork("model", Part([]))
    items |= {name: PartWork("text", part) for name, part in parts.text.items()}
    return items | {f"weights-{i:04d}": PartWork("weights", Part([]), layer=i) for i in range(layers)}


def _measurement(
    joined: Join,
    source: ModelSource,
    loaded: Loaded,
    parts: CorpusParts,
    results: Results,
    matched: Sequence[Prediction],
    known: Mapping[str, Any],
) -> Measurement | None:
    """Join the states of the finished parts; None if there is no text among them, or no model."""
    states = results.states
    texts = {name: states[name] for name in parts.text if name in states}
    if not texts or "model" not in states:
        return None
    model: ModelState = states["model"]
    weights = _weights(states, model, "weights")
    probed = Probed(source.label, model.architecture, weights, source.seed, words=model.words)
    state = joined("text", {name: each.state for name, each in texts.items()}, parts.text)
    extreme = greatest(token for each in texts.values() for token in each.extreme)
    documents = joined_documents([parts.documents[name] for name in texts])
    report = documents.report(parts.report)
    facts = {**known, **facts_of_text(report)}
    baseline, rows = _baseline(joined, source, parts, states, facts)
    values = [states[name] for name in parts.draws if name in states]
    reason = next((each for each in values if isinstance(each, str)), None)
    if reason is not None:
        facts["without_matched"], values = reason, []
    draws = by_prediction((draw for each in values for draw in each), matched) if values else ({}, {})
    listed = [token.token(source.label, loaded.tokenizer) for token in extreme]
    joinable = Joinable(documents, parts.windows, rows, {})
    return Measurement(probed, facts, state, baseline, *draws, report, listed, {}, False, joinable)


def _weights(states: Mapping[str, Any], model: ModelState, kind: str) -> dict[str, Any]:
    names = {layer: f"{kind}-{i:04d}" for i, layer in enumerate(model.architecture.attention)}
    return {layer: states[name] for layer, name in names.items() if states.get(name) is not None}


def _baseline(
    joined: Join, source: ModelSource, parts: CorpusParts, states: Mapping[str, Any], facts: dict[str, Any]
) -> tuple[Baseline | None, BaselineState | None]:
    """Return the random-weights baseline; if there is none, the facts say why."""
    model = states.get("baseline-model")
    if isinstance(model, str):
        facts["without_baseline"] = model
    if not isinstance(model, ModelState):
        return None, None
    chosen = {name: states[name] for name in parts.baseline if name in states}
    least = {
        part.group: LeastState(part.hash, states[f"baseline-{name}"])
        for name, part in parts.least.items()
        if f"baseline-{name}" in states
    }
    groups = frozenset(parts.baseline[name].group for name in chosen)
    rows = BaselineState(joined("baseline", chosen, parts.baseline), groups, least)
    weights = _weights(states, model, "baseline-weights")
    return Baseline(rows.state, Probed(baseline_name(source.label), model.architecture, weights, source.seed)), rows


def _joined(
    place: WorkFolder, modules: Modules, kind: str, states: Mapping[str, State], parts: Mapping[str, Part]
) -> State:
    """Merge the states of parts in the order of their ids; large ones of a group by way of the disk."""
    groups = []
    for group, names in groupby(sorted(states), key=lambda name: parts[name].group):
        every = [states[name] for name in names]
        state = reduce(merge, every)
        if len(every) > 1 and Encoded(state).nbytes >= LARGE:
            state = place.read(name := f"{kind}-{group}", place.write(name, state, JOINED), modules)
        groups.append(state)
    return reduce(merge, groups, {})
