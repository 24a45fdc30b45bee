"""Predictions over batches, without the runner: what a test of one prediction needs."""

import torch

from gradlogz.probing.corpus.text import Batch
from gradlogz.probing.findings import Finding
from gradlogz.probing.inside.capturing import follow
from gradlogz.probing.inside.discovery import trace
from gradlogz.probing.inside.hooks import without_cache
from gradlogz.probing.inside.weights import weights_of
from gradlogz.probing.prediction import Finished, Probed, Twin, split
from gradlogz.probing.statistics import GROUPS, merge


def token_batches(vocabulary, *, rows=4, length=24, batches=GROUPS, seed=0, padded=True):
    """Batches of random tokens, one of each group in turn; the last row of each is padded."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(batches):
        ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[-1, length * 2 // 3 :] = 0
        keys = torch.randint(0, 2**62, (rows,), generator=generator)
        names = [f"document {i} {row}" for row in range(rows)]
        inputs = {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}
        found.append(Batch(inputs, keys, i % GROUPS, names, torch.zeros(rows, dtype=torch.int64)))
    return found


def probed(model, batch, name="planted"):
    layout = trace(model, batch.inputs)
    return Probed(name, layout, weights_of(model, layout, batch.inputs), 0)


def state_of(prediction, model, batches, layout, change=lambda event: event):
    """The statistics of one prediction over batches; `change` tells it of other events than there were."""
    state = {}
    for batch in batches:
        memory = {}

        def tell(event, batch=batch, memory=memory):
            nonlocal state
            state = merge(state, prediction.statistics(change(event), batch, memory) or {})

        with follow(model, layout, tell), torch.no_grad():
            output = model(**batch.inputs, **without_cache(model))
        tell(Finished(output, batch.inputs))
    return state


def findings_of(prediction, state, model, twin=None):
    """The values beside their nulls."""
    nulls = {(n.layer, n.head, n.quantity): n for n in prediction.null(state, model, twin)}
    rows = []
    for m in prediction.evaluate(state, model):
        n = nulls.get((m.layer, m.head, m.quantity))
        layer, call = split(m.layer)
        null = (torch.nan,) * 3 if n is None else (n.value, n.low, n.high)
        name = prediction.__name__.rpartition(".")[2]
        rows.append(Finding(model.name, name, layer, call, m.head, m.quantity, *m[3:6], *null, m.tokens))
    return rows


def judged(prediction, model, batches, twin=None, change=lambda event: event):
    """The judgement on a model, beside a twin if it is given."""
    one = probed(model, batches[0])
    other = None
    if twin is not None:
        same = probed(twin, batches[0], "twin")
        other = Twin(state_of(prediction, twin, batches, same.layout), same)
    state = state_of(prediction, model, batches, one.layout, change)
    return prediction.verdict(findings_of(prediction, state, one, other))
