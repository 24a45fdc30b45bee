"""Evaluation of one prediction over batches, without the runner, for tests of predictions."""

from dataclasses import replace

import torch

from gradlogz.probing.batch_pass import BatchPass
from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.inside.embeddings import word_vectors_of
from gradlogz.probing.inside.events import ForwardOutput
from gradlogz.probing.inside.following import follow
from gradlogz.probing.inside.hooks import without_cache
from gradlogz.probing.inside.weights import weights_of
from gradlogz.probing.prediction import Baseline, Probed
from gradlogz.probing.runs.judgement import Measured, split
from gradlogz.probing.runs.records import Finding
from gradlogz.probing.statistics import GROUPS, merge


def token_batches(vocabulary, *, rows=4, length=24, batches=GROUPS, seed=0, padded=True):
    """Return batches of random tokens, cycling through the groups; the last row of each is padded."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for i in range(batches):
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[-1, length * 2 // 3 :] = 0
        keys = torch.randint(0, 2**62, (rows,), generator=generator)
        names = [f"document {i} {row}" for row in range(rows)]
        inputs = {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}
        drawn.append(Batch(inputs, keys, i % GROUPS, names, torch.zeros(rows, dtype=torch.int64)))
    return drawn


def probed(model, batch, name="planted"):
    architecture = discover(model, batch.inputs)
    weights, words = weights_of(model, architecture, batch.inputs), word_vectors_of(model, architecture)
    return Probed(name, architecture, weights, 0, words=words)


def state_of(prediction, model, batches, architecture, change=lambda event: event):
    """The statistics of one prediction over batches; `change` tells it of other events than there were."""
    prediction = getattr(prediction, "PREDICTION", prediction)
    state = prediction.empty()
    for batch in batches:
        batch_pass = BatchPass(batch)

        def tell(event, batch_pass=batch_pass):
            nonlocal state
            batch_pass.begin_event()
            state = merge(state, prediction.statistics(change(event), batch_pass))

        with follow(model, architecture, tell), torch.no_grad():
            output = model(**batch.inputs, **without_cache(model))
        tell(ForwardOutput(output, batch.inputs))
    return state


def tensors_of(state, name=""):
    """Return the tensors of a state by name, on the CPU."""
    if isinstance(state, torch.Tensor):
        return {name: state.cpu()}
    parts = state if isinstance(state, dict) else state._asdict() if hasattr(state, "_fields") else None
    if parts is None:
        parts = dict(enumerate(state)) if isinstance(state, tuple) else {}
    return {key: t for part, each in parts.items() for key, t in tensors_of(each, f"{name}/{part}").items()}


def findings_of(prediction, state, model, baseline=None):
    """The values beside their nulls."""
    prediction = getattr(prediction, "PREDICTION", prediction)
    nulls = {(n.layer, n.head, n.quantity): n for n in prediction.null(state, model, baseline)}
    rows = []
    for m in prediction.evaluate(state, model):
        n = nulls.get((m.layer, m.head, m.quantity))
        layer, call = split(m.layer)
        row = Finding(model.name, prediction.name, layer, call, m.head, m.quantity, *m[3:6], tokens=m.tokens)
        row = row._replace(freedom=m.freedom)
        if n is not None:
            row = row._replace(null=n.value, null_low=n.low, null_high=n.high, null_freedom=n.freedom)
        rows.append(row)
    return rows


def details_of(judgement):
    """Details by key."""
    return {detail.key: detail for detail in judgement.details}


def remarks_of(judgement):
    """Remarks by key."""
    return {remark.key: remark for remark in judgement.remarks}


def with_draws(baseline, draws, values):
    """The baseline with draws that are its matched ones, and are of equal logit variance too."""
    mine = {m[:3]: m.value for m in values}
    rescaled = tuple([Measured(*m[:3], m.value - mine[m[:3]]) for m in draw if m[:3] in mine] for draw in draws)
    return replace(baseline, matched=tuple(draws), rescaled=rescaled)


def judged(prediction, model, batches, baseline=None, change=lambda event: event, matched=()):
    """The judgement on a model, with a random-weights baseline and matched models if there are any.

    Matched models stand for draws of both nulls.
    """
    one = probed(model, batches[0])
    state = state_of(prediction, model, batches, one.architecture, change)
    other = None
    if baseline is not None:
        same = probed(baseline, batches[0], "baseline")
        other = Baseline(state_of(prediction, baseline, batches, same.architecture), same)
    if matched:
        draws = [(state_of(prediction, each, batches, one.architecture), probed(each, batches[0])) for each in matched]
        other = other or Baseline(getattr(prediction, "PREDICTION", prediction).empty(), one)
        other = with_draws(other, [prediction.evaluate(*draw) for draw in draws], prediction.evaluate(state, one))
    return prediction.verdict(findings_of(prediction, state, one, other))
