"""A probe in parts: an engine computes them, their states are joined in the order of their ids.

    text       statistics of the model, and its extreme tokens
    baseline   statistics of the random-weights baseline, or the reason why there is none
    draws      values of predictions in draws of the matched baseline, or the reason why there are none
    weights    matrices of one attention layer of the model, or of its baseline

The same call continues in its folder where it stopped.

Read next: corpus_parts.py (the parts), joined_parts.py (which joins them), ../run_probe.py (the pass without parts).
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch

from ..._input_errors import InputRuntimeError
from ...engine.engines import Engine, InProcess
from ...engine.work_folder import WorkFolder
from ...engine.work_loop import run_items
from ..corpus.batching import PADDED, Batch, Batches
from ..corpus.inputs import Inputs
from ..corpus.readers import batches_of
from ..inside.embeddings import word_vectors_of
from ..inside.head_weights import HeadWeights
from ..inside.loading import Loaded, describe
from ..inside.offloading import device_of
from ..inside.weights import weights_of
from ..measurement_file import modules_of
from ..passes.batch_statistics import statistics_of
from ..passes.extreme_tokens import ExtremeToken, greatest
from ..passes.matched_draws import Draw
from ..passes.memory_limits import MOST, bundles_of, check_part_memory
from ..passes.nulls import check_nulls, matched_of, untrained_of
from ..passes.placement import placed
from ..passes.rotated_heads import drawn
from ..prediction import Prediction, Probed
from .corpus_parts import CorpusParts, DividedOutcome, DividedPass, Part, batches_in, corpus_parts
from .joined_parts import ModelState, TextState, in_bundle, joined_measurement
from .model_source import ModelSource
from .opened_models import MODELS, Opened, predictions_of


class PartWork(NamedTuple):
    """One item of work.

    layer: number of the attention layer whose matrices are computed. bundle: number of the bundle of predictions.
    """

    kind: Literal["text", "baseline", "draws", "weights", "model"]
    part: Part
    random: bool = False
    layer: int = 0
    bundle: int = 0


STATES = {  # of the parts of each kind; a random-weights baseline may have the reason why there is none
    "text": (TextState,), "baseline": (dict,), "draws": (list, str), "weights": (HeadWeights, NoneType),
    "model": (ModelState,),
}  # fmt: skip
PartState = TextState | ModelState | dict[str, Any] | list[Draw] | HeadWeights | str | None


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
) -> DividedOutcome:
    """Measure a model on a corpus in parts.

    Args:
        source: the model, for workers; `loaded` is the model of this process, used for its tokenizer and its facts.
        facts: what the parts depend on; a folder of parts with other facts is refused.
        known: facts of the model for the measurement.

    Laws: tests/laws/test_a_divided_probe_is_one_probe.py, tests/faults/test_a_divided_probe_survives.py.
    """
    check_nulls(options.baseline, options.draws)
    matched = matched_of(predictions, draws=options.draws, baseline=options.baseline)
    untrained = untrained_of(predictions, baseline=options.baseline)
    place = WorkFolder("probe", folder, facts, restart=restart)
    with place.opened():
        parts = corpus_parts(
            place, _reading(source, loaded, corpus, options), parts=options.parts,
            baseline=options.baseline if untrained else 0.0, draws=options.draws if matched else 0,
        )  # fmt: skip
        MODELS.give(source, loaded.model)
        layers, bundles = _sizes(place, source, device_of(loaded.model), parts, predictions)
        MODELS.clear()  # workers have their own; here it is opened again as they do it, with one thread
        if isinstance(engine, InProcess):
            MODELS.give(source, loaded.model)
        items, begun = _items(parts, layers, bundles, random=bool(untrained)), time.perf_counter()
        results = run_items(
            partial(part_state, place, source, parts.first), items, engine=engine, folder=place, call="probe",
            modules=modules_of(predictions), progress=progress,
        )  # fmt: skip
        MODELS.clear()
        _check_states(place, items, results.states)
        described = {**describe(loaded.model), **known}
        measured = joined_measurement(
            place, source, loaded.tokenizer, parts, bundles, results.states, predictions, described
        )
        if measured is not None:
            seconds, complete = {"parts": time.perf_counter() - begun}, len(results.states) == len(items)
            measured = measured._replace(seconds=seconds, complete=complete)
    return DividedOutcome(measured, results.failures, results.interrupted, len(results.states), len(items))


def _reading(source: ModelSource, loaded: Loaded, corpus: Iterable[Any], options: DividedPass) -> Batches | Inputs:
    """Return the batches of a corpus, whose size depends on the options and not on the machine."""
    padded = PADDED * (MOST if (source.device or "").startswith("cuda") else 1)
    return batches_of(
        loaded.tokenizer, corpus, tokens=options.tokens, length=options.length, padded=padded, seed=options.seed
    )


def _sizes(
    place: WorkFolder, source: ModelSource, device: torch.device, parts: CorpusParts, predictions: Sequence[Prediction]
) -> tuple[int, int]:
    """Return the numbers of attention layers and of bundles; raise if the matrices of one do not fit into memory."""
    state = part_state(place, source, parts.first, PartWork("model", Part([])))
    assert isinstance(state, ModelState)
    check_part_memory(state.architecture, predictions, device)
    return len(state.architecture.attention), len(bundles_of(state.architecture, predictions))


def _items(parts: CorpusParts, layers: int, bundles: int, *, random: bool) -> dict[str, PartWork]:
    """Return the items of work by id; those of the baseline come first, so that a worker changes its model once."""
    items: dict[str, PartWork] = {}
    for i in range(bundles):
        if random:
            of_rows = {**parts.baseline, **{f"baseline-{name}": part for name, part in parts.least.items()}}
            items |= {in_bundle(n, i): PartWork("baseline", part, True, bundle=i) for n, part in of_rows.items()}
        items |= {in_bundle(n, i): PartWork("text", part, bundle=i) for n, part in parts.text.items()}
    if random:
        items["baseline-model"] = PartWork("model", Part([]), random=True)
        items |= {f"baseline-weights-{i:04d}": PartWork("weights", Part([]), True, i) for i in range(layers)}
    items |= {name: PartWork("draws", part) for name, part in parts.draws.items()}
    items["model"] = PartWork("model", Part([]))
    return items | {f"weights-{i:04d}": PartWork("weights", Part([]), layer=i) for i in range(layers)}


def _check_states(place: WorkFolder, items: Mapping[str, PartWork], states: Mapping[str, Any]) -> None:
    """Raise unless every state is that of a part of its kind: whoever may write into the folder may exchange files."""
    for name, state in states.items():
        kinds = STATES[items[name].kind]
        if not isinstance(state, (*kinds, str) if items[name].random else kinds):
            problem = f"the file of {name} in {place.path} has another state than a part of this name"
            raise InputRuntimeError("probe", "--resume", problem, "Begin again with --restart.")


# A part -----------------------------------------------------------------------------------------------------------


def part_state(place: WorkFolder, source: ModelSource, first: str, work: PartWork) -> PartState:
    """Return the state of a part; a text is the reason why there is none."""
    (batch,) = batches_in(place, Part([first]))
    opened = MODELS.opened(source, batch, random=work.random)
    if opened.reason:
        return opened.reason
    if work.kind in ("model", "weights"):
        return _of_model(opened, batch, work)
    predictions = predictions_of(source)
    batches = batches_in(place, work.part)
    if work.kind == "draws":
        probed = Probed(source.label, opened.architecture, {}, source.seed)
        matched = [p for p in predictions if p.baseline == "matched"]
        try:
            return list(drawn(opened.model, list(batches), work.part.numbers, matched, probed))
        except ValueError as error:  # logits that overflow: so they would in the next attempt
            return str(error)  # too little memory raises: the part has failed, and the same command repeats it
    bundle = bundles_of(opened.architecture, predictions)[work.bundle]
    measured = [p for p in bundle if not work.random or p.baseline == "statistics"]
    state: dict[str, Any] = {}
    extreme: list[ExtremeToken] = []
    for each in batches:
        state, tokens = statistics_of(opened.model, opened.architecture, placed(each, opened.model), measured, state)
        extreme = greatest([*extreme, *tokens])
    return state if work.random else TextState(state, extreme)


def _of_model(opened: Opened, first: Batch, work: PartWork) -> PartState:
    model, architecture = opened.model, opened.architecture
    if work.kind == "model":
        return ModelState(architecture, {} if work.random else word_vectors_of(model, architecture))
    layer = architecture.attention[work.layer]
    return weights_of(model, architecture, placed(first, model).inputs, only=layer).get(layer)
