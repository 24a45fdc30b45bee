"""Interventions on every layer and head of a model, and the change of its loss.

    gradient       the component of each attention update along the gradient of the log normaliser is removed
    steps          eps |D| times that direction is added to the update D, for eps of both signs
    layers, heads  a layer's heads, all or one, are replaced: Gaussian formula, uniform, mean, zero
    feed_forward   the feed-forward sublayer is replaced: affine fit, mean

    effect       = [sum of losses with the intervention - sum of losses] / number of tokens
    difference   = effect - effect of the control, on the same tokens of the same documents

Means and affine maps are fitted to one half of the documents, losses are measured on the other. Confidence intervals
come from the Poisson bootstrap over documents, which all passes share, so that differences are paired.

Read next: edited_passes.py (how a tensor is replaced), losses.py (the loss), records.py (the results).
"""

import heapq
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn.functional import pad

from ..._errors import InputTypeError, InputValueError
from ..._progress import Progress, reporter
from ..._typing import Float, Tensor
from ..batch_pass import BatchPass
from ..corpus.batching import Batch, batches
from ..corpus.text import Document, Source, documents
from ..inside.architecture import Architecture
from ..inside.discovery import cut, discover
from ..inside.events import Attended, AttentionArguments, Event, LayerCall, Passed
from ..inside.following import follow
from ..inside.hooks import evaluation_mode, without_cache
from ..inside.loading import describe
from ..passes.memory_limits import tokens_of_a_batch
from ..passes.placement import placed
from ..runs.judgement import split
from ..statistics import Sums, benjamini_hochberg, bootstrap, hash_of, mean, p_values, sums_of
from .edited_passes import Replacement, edited, recording, resumable_blocks, resuming
from .fitted_parts import FittedParts, PartSums
from .gradient_steps import REMOVED, directions_of, edited_updates, gradient_of
from .losses import Kind, Task, kind_of, loss_of, representation_of, task_of
from .records import Effect, Interventions
from .replaced_heads import gaussian_and_uniform, with_head

Intervention = Literal["gradient", "steps", "layers", "heads", "feed_forward"]
INTERVENTIONS: tuple[Intervention, ...] = get_args(Intervention)
TOKENS, FIT_TOKENS = 2_000, 20_000  # default numbers of tokens of the losses and of the fits
STEPS = (-0.5, -0.1, 0.1, 0.5)  # default multiples of the norm of the update
SHORTEST = 8  # mean number of tokens of a window that is certainly reached; bounds the number of documents in memory
DRAWS = 2  # random directions of a control
GAUSSIAN, UNIFORM, MEAN, ZERO, AFFINE = "gaussian", "uniform", "mean", "zero", "affine"


class _Key(NamedTuple):
    """The column of the losses of an intervention, or of its control."""

    intervention: Intervention
    variant: str
    control: str
    layer: str
    head: int | None


class _Plan(NamedTuple):
    """A model and the interventions on it."""

    model: nn.Module
    architecture: Architecture
    blocks: dict[str, nn.Module]
    kind: Kind
    tokenizer: Any
    interventions: Sequence[Intervention]
    steps: tuple[float, ...]
    draws: int
    seed: int
    sublayers: str
    parts: FittedParts = FittedParts({}, {}, 0)

    def run(self, task: Task) -> Any:
        return self.model(**task.inputs, **without_cache(self.model))

    def sites(self) -> list[str]:
        """Names of the attention layers and feed-forward sublayers on which there are interventions."""
        attention = self.architecture.attention if {*self.interventions} - {"feed_forward"} else ()
        return [name for name in (*attention, *self.parts.feed_forward) if re.search(self.sublayers, name)]

    def sites_by_block(self) -> dict[str, list[str]]:
        """Sites by the name of their block; under "" those outside the blocks that passes may begin at."""
        block_of = {site: next((b for b in self.blocks if site.startswith(f"{b}.")), "") for site in self.sites()}
        return {block: [s for s in block_of if block_of[s] == block] for block in dict.fromkeys(block_of.values())}


def intervene(
    model: nn.Module,
    tokenizer: Any,
    texts: Source = None,
    *,
    name: str | None = None,
    interventions: Sequence[str] | None = None,
    tokens: int = TOKENS,
    fit_tokens: int = FIT_TOKENS,
    length: int | None = None,
    sublayers: str = "",
    steps: Sequence[float] = STEPS,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Progress = False,
) -> Interventions:
    """Measure the change of the loss of a model when parts of its computation are removed, added to or replaced.

    The loss is that of the next token for causal models, that of masked tokens for masked models, and the cosine
    distance of the final representations for models without a language-model head. The model is left bitwise unchanged.

    Args:
        texts: as in `probe`: a file, a folder, "-" for standard input, or a list; help topics of Python if None.
        interventions: some of "gradient", "steps", "layers", "heads" and "feed_forward"; all by default.
        tokens: approximate number of tokens on which losses are measured; every pass reads all of them.
        fit_tokens: approximate number of tokens of other documents, to which means and affine maps are fitted.
        length: maximum window length in tokens; by default 1024 or the context length, whichever is smaller.
        sublayers: regular expression for the names of attention layers and feed-forward sublayers; all by default.
        steps: multiples of the norm of an update that are added to it along the gradient.
        draws: number of random directions whose mean effect is the control of a direction.
        seed: seed of the choice of documents and of the random directions.
        progress: True for a bar on standard error, or a function f(layers done, total).

    Law: tests/laws/test_interventions_change_what_they_name.py.
    """
    _check(tokenizer, sublayers, draws)
    chosen = chosen_interventions(interventions)
    corpus = _documents(texts)
    padded = min(tokens_of_a_batch(model), max(tokens, 1))
    halves = {fitted: partial(_half, corpus, fitted) for fitted in (True, False)}
    batches((), tokenizer, tokens=1, length=length)  # raises if the length is not possible
    reading = joined(single_windows(halves[False](), tokenizer, tokens=tokens, length=length, seed=seed), padded)
    if not reading:
        problem = "no document of at least two tokens is in the half on which losses are measured"
        raise InputValueError("intervene", "texts", problem, "Pass more documents.")
    first = placed(reading[0], model)
    architecture = discover(model, first.inputs)
    kind = kind_of(model, tokenizer, first)
    needs = {"heads": bool({"layers", "heads"} & {*chosen}), "feed_forward": "feed_forward" in chosen}
    blocks = resumable_blocks(model, architecture, cut(first.inputs))
    plan = _Plan(model, architecture, blocks, kind, tokenizer, chosen, tuple(steps), draws, seed, sublayers)
    if any(needs.values()):
        fitting = batches(halves[True](), tokenizer, tokens=fit_tokens, length=length, padded=padded, seed=seed)
        plan = plan._replace(parts=_fitted(plan, fitting, PartSums(**needs)))
    show, sites = reporter(progress, "layers"), len(plan.sites())
    if not sites:
        every = [*architecture.attention, *(s.name for s in architecture.sublayers if s.kind == "feed_forward")]
        problem = f"no sublayer of these interventions has a name that matches {sublayers!r}"
        raise InputValueError("intervene", "sublayers", problem, f"Names are like {every[0]} and {every[-1]}.")
    keys: list[_Key] = []
    sums: Sums | None = None
    with evaluation_mode(model):
        for number, batch in enumerate(reading):
            report = partial(_report, show, number * sites, len(reading) * sites)
            keys, columns = _losses(plan, placed(batch, model), report)
            added = sums_of(columns, batch.keys.to(columns.device))
            sums = added if sums is None else sums.merge(added)
    assert sums is not None  # there is at least one batch
    names = {row for batch in reading for row in batch.names}
    loss = bootstrap(mean, sums)
    facts = {
        **describe(model), "loss": kind, "loss_value": float(loss.value), "loss_low": float(loss.low),
        "loss_high": float(loss.high), "tokens": int(sums.totals[0, 0]), "documents": len(names),
        "fit_tokens": plan.parts.tokens, "draws": draws, "seed": seed,
    }  # fmt: skip
    return Interventions(name or type(model).__name__, facts, _effects(keys, sums))


def _report(show: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    show(before + done, total)


def chosen_interventions(names: Sequence[str] | None) -> list[Intervention]:
    """Return the interventions of these names; all if None."""
    names = INTERVENTIONS if names is None else names
    unknown = [name for name in names if name not in INTERVENTIONS]
    if unknown or not names:
        problem = f"there is no intervention named {unknown[0]!r}" if unknown else "interventions is empty"
        raise InputValueError("intervene", "interventions", problem, f"Choose from {', '.join(INTERVENTIONS)}.")
    return [name for name in INTERVENTIONS if name in names]


def _check(tokenizer: Any, sublayers: str, draws: int) -> None:
    if not callable(tokenizer):
        problem = f"tokenizer must be a callable that maps text to tokens, got {type(tokenizer).__name__}"
        raise InputTypeError("intervene", "tokenizer", problem, "Pass the tokenizer of the model; losses are of text.")
    try:
        re.compile(sublayers)
    except re.error as error:
        problem = f"sublayers must be a regular expression, got {sublayers!r} ({error})"
        raise InputValueError(
            "intervene", "sublayers", problem, "Escape special characters with a backslash."
        ) from None
    if draws < 1:
        problem = f"draws must be 1 or more, got {draws}"
        raise InputValueError("intervene", "draws", problem, "Pass the number of random directions of a control.")


def _documents(texts: Source) -> Callable[[], Iterable[Document]]:
    """Return a function that reads the documents of a source anew; those that can be read once are stored."""
    if isinstance(texts, str) and texts != "-":
        return lambda: documents(texts)
    if texts is None or isinstance(texts, os.PathLike):
        return lambda: documents(texts)
    stored = list(documents(texts))
    return lambda: stored


def _half(corpus: Callable[[], Iterable[Document]], fitted: bool) -> Iterator[Document]:
    """Yield the half of the documents to which means and affine maps are fitted, or the other half."""
    return (document for document in corpus() if (hash_of(f"fit {document.name}") % 2 == 0) == fitted)


def single_windows(
    half: Iterable[Document], tokenizer: Any, *, tokens: int, length: int | None, seed: int
) -> Iterator[Batch]:
    """Yield one window of each document, chosen by hash, until they have a number of tokens.

    Documents are the sampling units of confidence intervals: this choice has the most units for a number of tokens. All
    documents are equally likely, and so are the windows of a document.
    """
    most = max(tokens // SHORTEST, 2)
    for document in heapq.nsmallest(most, half, key=lambda each: hash_of(f"{seed} {each.name}")):
        try:
            windows = list(batches([document], tokenizer, tokens=None, length=length, size=1))
        except InputValueError:  # fewer than two tokens
            continue
        windows.sort(key=lambda window: int(window.starts[0]))
        window = windows[hash_of(f"window {seed} {document.name}") % len(windows)]
        yield window
        tokens -= window.inputs["input_ids"].shape[1]
        if tokens <= 0:
            break


def joined(reading: Iterable[Batch], padded: int) -> list[Batch]:
    """Join batches up to a number of tokens, padding included: here documents of several groups may share a pass."""
    passes: list[list[Batch]] = []
    rows = longest = 0
    for batch in reading:
        b, n = batch.inputs["input_ids"].shape
        longest = max(longest, n)
        if not passes or (rows + b) * longest > padded:
            passes.append([])
            rows, longest = 0, n
        passes[-1].append(batch)
        rows += b
    return [_joined(each) for each in passes]


def _joined(parts: Sequence[Batch]) -> Batch:
    longest = max(part.inputs["input_ids"].shape[1] for part in parts)
    inputs = {
        name: torch.cat([pad(part.inputs[name], (0, longest - part.inputs[name].shape[1])) for part in parts])
        for name in parts[0].inputs
    }
    names = [name for part in parts for name in part.names]
    keys, starts = (torch.cat([getattr(part, name) for part in parts]) for name in ("keys", "starts"))
    return Batch(inputs, keys, parts[0].group, names, starts)


# Passes --------------------------------------------------------------------------------------------------------------


def _fitted(plan: _Plan, reading: Iterable[Batch], sums: PartSums) -> FittedParts:
    """Return the means and affine maps of the model on the documents of these batches, in one pass."""
    for batch in reading:
        batch = placed(batch, plan.model)
        batch_pass = BatchPass(batch)
        with follow(plan.model, plan.architecture, partial(sums.add, batch_pass=batch_pass), statistics="none"):
            plan.run(task_of(plan.kind, batch, plan.tokenizer))
        sums.tokens += int(batch.inputs["attention_mask"].sum())
    return sums.fitted()


@dataclass
class _Snapshot:
    """The unedited tensors of one site."""

    attended: Attended | None = None
    passed: Passed | None = None


def _losses(plan: _Plan, batch: Batch, show: Callable[[int], None]) -> tuple[list[_Key], Float[Tensor, "b k"]]:
    """Return the columns of a batch: number of tokens, loss of the model, and the losses of the edited passes."""
    task = task_of(plan.kind, batch, plan.tokenizer)
    with edited(plan.model, plan.architecture) as replaceable, recording(plan.blocks) as outputs:
        output = plan.run(task)
    reference = representation_of(output).double() if task.targets is None else None
    base = loss_of(task, output, reference)
    losses: dict[_Key, list[Tensor]] = {}
    done = 0
    for block, sites in plan.sites_by_block().items():
        with resuming(plan.blocks, outputs, block):
            snapshots = _snapshots(plan, task, sites)
            for site in sites:
                for key, replacement in _edits(plan, site, snapshots[site], batch, site in replaceable):
                    with edited(plan.model, plan.architecture, replacement):
                        losses.setdefault(key, []).append(loss_of(task, plan.run(task), reference))
                done += 1
                show(done)
    draws = [torch.stack(each).mean(0) for each in losses.values()]
    return list(losses), torch.stack([task.scored.sum(1).double(), base, *draws], 1)


def _snapshots(plan: _Plan, task: Task, sites: Sequence[str]) -> dict[str, _Snapshot]:
    """Return the unedited tensors of some sites, from one pass."""
    snapshots = {site: _Snapshot() for site in sites}

    def store(event: Event) -> None:
        if isinstance(event, Attended) and event.layer in snapshots:
            snapshots[event.layer].attended = event
        elif isinstance(event, Passed) and event.sublayer.name in snapshots:
            snapshots[event.sublayer.name].passed = event

    with follow(plan.model, plan.architecture, store, statistics="none"):
        plan.run(task)
    return snapshots


def _edits(
    plan: _Plan, site: str, snapshot: _Snapshot, batch: Batch, replaceable: bool
) -> Iterator[tuple[_Key, Replacement]]:
    """Yield the edits of one site, each with the column of its loss."""
    attended, passed = snapshot.attended, snapshot.passed
    if attended is None and passed is not None:
        yield from _feed_forward_edits(plan, site, passed)
    if attended is None or attended.crosses or not isinstance(attended.call, AttentionArguments):
        return
    if passed is not None and attended.layer_call is not None:
        yield from _gradient_edits(plan, site, attended.layer_call, passed, batch)
    if replaceable and attended.call.sinks is None and site in plan.parts.heads:
        yield from _head_edits(plan, site, attended.call, attended.attention.output)


def _gradient_edits(
    plan: _Plan, site: str, layer_call: LayerCall, passed: Passed, batch: Batch
) -> Iterator[tuple[_Key, Replacement]]:
    removes, steps = "gradient" in plan.interventions, plan.steps if "steps" in plan.interventions else ()
    gradient = gradient_of(layer_call, passed.stream) if removes or steps else None
    if gradient is None:
        return
    directions = directions_of(gradient, passed.stream, passed.sublayer, batch, draws=plan.draws, seed=plan.seed)
    for edit in edited_updates(passed.update, directions, steps):
        intervention: Intervention = "gradient" if edit.variant == REMOVED else "steps"
        if intervention in plan.interventions:
            yield _Key(intervention, edit.variant, edit.control, site, None), Replacement(site, "update", edit.update)


def _head_edits(
    plan: _Plan, site: str, call: AttentionArguments, output: Float[Tensor, "b h m v"]
) -> Iterator[tuple[_Key, Replacement]]:
    gaussian, uniform = gaussian_and_uniform(call)
    mean = plan.parts.heads[site].to(output.dtype)[None, :, None, :]
    others = {"": gaussian, UNIFORM: uniform, MEAN: mean, ZERO: torch.zeros_like(mean)}
    places: list[tuple[Intervention, int | None]] = [("layers", None)] if "layers" in plan.interventions else []
    if "heads" in plan.interventions:
        places += [("heads", head) for head in range(output.shape[1])]
    for intervention, head in places:
        for control, other in others.items():
            replacement = Replacement(site, "output", with_head(output, head, other))
            yield _Key(intervention, GAUSSIAN, control, site, head), replacement


def _feed_forward_edits(plan: _Plan, site: str, passed: Passed) -> Iterator[tuple[_Key, Replacement]]:
    affine = plan.parts.feed_forward[site]
    updates = {"": affine(passed.input), MEAN: affine.mean.to(passed.update).expand_as(passed.update)}
    for control, update in updates.items():
        yield _Key("feed_forward", AFFINE, control, site, None), Replacement(site, "update", update)


# Effects -------------------------------------------------------------------------------------------------------------


def _effects(keys: Sequence[_Key], sums: Sums) -> list[Effect]:
    """Return the effect of every intervention beside each of its controls, with the tests of their differences."""
    column = {key: 2 + i for i, key in enumerate(keys)}
    pairs = [(key._replace(control=""), key) for key in keys if key.control]
    if not pairs:
        return []
    one, other = ([column[pair[side]] for pair in pairs] for side in (0, 1))
    change = bootstrap(lambda t: (t[..., one] - t[..., 1:2]) / t[..., :1], sums)
    control = (sums.totals[0, other] - sums.totals[0, 1]) / sums.totals[0, 0]
    difference = bootstrap(lambda t: (t[..., one] - t[..., other]) / t[..., :1], sums)
    p = p_values(*(t.cpu() for t in difference[:4]))
    comparisons: dict[tuple[str, str, str], list[int]] = {}
    for i, (_, key) in enumerate(pairs):
        comparisons.setdefault((key.intervention, key.variant, key.control), []).append(i)
    rejected = torch.zeros(len(pairs), dtype=torch.bool)
    for rows in comparisons.values():
        rejected[rows] = benjamini_hochberg(p[rows])
    effects = []
    for i in chain.from_iterable(comparisons.values()):
        key, (layer, call) = pairs[i][1], split(pairs[i][1].layer)
        value, low, high = (float(t[i]) for t in change[:3])
        apart, apart_low, apart_high = (float(t[i]) for t in difference[:3])
        outcome = ("above" if apart > 0 else "below") if rejected[i] else ""
        effect = Effect(
            key.intervention, key.variant, key.control, layer, call, key.head, value, low, high, float(control[i]),
            apart, apart_low, apart_high, float(p[i]), outcome, int(sums.totals[0, 0]),
        )  # fmt: skip
        effects.append(effect)
    return effects
