"""Updates that climb, descend or do neither: the verdicts of four claims on models with a known answer.   [theory E7]

Ascent and expansion are claims about updates, the tie is one about matrices, and the pair energy rises by a theorem
where its conditions hold [theory 5.1, 5.3]. Untrained networks say nothing, whatever the scale of their weights.
"""

import pytest

from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.predictions import ascent, expansion, pair_energy, tie
from gradlogz.probing.predictions.observables import moved_tokens
from gradlogz.probing.statistics import merge
from support.planted import matrices
from support.planted.energies import attending
from support.planted.updates import (
    bert,
    gpt2,
    half_tied,
    identical,
    opposed,
    positive,
    positive_and_tied,
    seeded,
    to_itself,
    transposed,
    untrained,
)
from support.probe_models import findings_of, probed, token_batches

CLAIMS = (ascent, tie, expansion, pair_energy)
VERDICTS = {"S": "supported", "R": "refuted", "U": "inconclusive", "N": "not applicable"}


@pytest.fixture(autouse=True)
def _many_tokens(monkeypatch):
    monkeypatch.setattr(moved_tokens, "PART", 4)


def judgements(model, vocabulary=matrices.VOCABULARY, claims=CLAIMS):
    """The judgements of these claims, all from one pass."""
    batches = token_batches(vocabulary, rows=4, length=48)
    known = probed(model, batches[0])
    state = {}
    for batch in batches:
        state = merge(state, statistics_of(model, known.architecture, batch, [c.PREDICTION for c in claims])[0])
    return [c.verdict(findings_of(c, state[c.PREDICTION.name], known)) for c in claims]


# What many heads of the BERTs attend to has one axis. Only the sign of the tie is left there, which half of all random
# heads have, so that these heads are inconclusive.
PLANTED = {  # ascent, tie, expansion, pair energy
    "untrained GPT-2": (lambda: untrained("gpt2", 0.02), "UUUN"),
    "untrained GPT-2, larger scale": (lambda: untrained("gpt2", 0.25), "UUUN"),
    "untrained BERT": (lambda: untrained("bert", 0.02), "UUUN"),
    "untrained BERT, larger scale": (lambda: untrained("bert", 0.25), "UUUN"),
    "tied GPT-2": (lambda: gpt2(matrices.tied), "SSSN"),
    "tied BERT": (lambda: bert(matrices.tied), "SUSN"),
    "anti-tied GPT-2": (lambda: gpt2(opposed), "RRRN"),
    "anti-tied BERT": (lambda: bert(opposed), "RURN"),
    "tie of strength .3": (lambda: gpt2(half_tied, width=64), "SSSN"),
    "OV = tau QK, not transposed": (lambda: gpt2(transposed), "UUUN"),
    "positive QK, free OV": (lambda: gpt2(positive), "UUUN"),
    "positive QK, tied OV": (lambda: gpt2(positive_and_tied), "SSSN"),
    "tokens are keys and values, four heads": (lambda: bert(identical), "UUSN"),  # one axis in every head
    "the network of the theory": (lambda: attending(0.3), "SSSS"),
    "the network of the theory, reversed": (lambda: attending(-0.3), "RRRN"),
    "update c x, undone by the norm": (to_itself, "USUS"),  # tied; words that occur twice still gather, by the theorem
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_models_get_the_right_verdicts(name):
    build, expected = PLANTED[name]
    found = [each.verdict for each in judgements(seeded(build), 96 if "theory" in name or "c x" in name else 512)]
    assert found == [VERDICTS[letter] for letter in expected]


@pytest.mark.parametrize("layers", [8, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("scale", [0.02, 0.25])
def test_layers_of_random_weights_seldom_get_a_verdict(kind, scale, layers):
    """Of the layers or heads of random networks at most 5 % are supported, and at most 5 % refuted, up to chance."""
    model = untrained(kind, scale, seed=1, layers=layers)
    for judgement in judgements(model, claims=CLAIMS[:3]):
        allowed = 0.05 * judgement.judged + 3 * (0.05 * 0.95 * judgement.judged) ** 0.5
        assert judgement.judged >= layers
        assert judgement.supported <= allowed, judgement.quantity
        assert judgement.refuted <= allowed, judgement.quantity
