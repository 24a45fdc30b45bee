"""One planted property decides the claims about it and no others, in one run of the probe.

Query and key matrices that are unrelated, whatever is tied to them, are neither aligned nor opposed to each other, and
no selective heads; equal ones are positive, which no training needs. Only their opposition refutes. Feed-forward maps
and losses have nothing planted.
"""

import pytest

from gradlogz import probe
from gradlogz.probing.runs.records import TESTED
from support.planted import matrices
from support.planted.updates import gpt2, negative, opposed, positive, seeded, transposed, untrained
from support.probe_models import token_batches

CLAIMS = ["qk_geometry", "link", "gaussian_measure", "entropy", "feed_forward_hopfield", "dropped_covariance"]
NOTHING = {name: {"inconclusive"} for name in ("entropy", "gaussian_measure", "feed_forward_hopfield")}
# Correlated by construction or not, the loss of random models is almost constant.
UNRELATED = NOTHING | {
    "qk_geometry": {"inconclusive"},
    "link": {"inconclusive"},
    "dropped_covariance": {"inconclusive"},
}
POSITIVE = {
    "qk_geometry": {"inconclusive"},
    "link": {"inconclusive"},
    "gaussian_measure": {"refuted", "inconclusive"},
    "entropy": {"supported", "inconclusive"},
    "feed_forward_hopfield": {"inconclusive"},
    "dropped_covariance": {"inconclusive"},
}
PLANTED = {
    "untrained GPT-2, larger scale": (lambda: untrained("gpt2", 0.25), UNRELATED),
    "tied GPT-2": (lambda: gpt2(matrices.tied), UNRELATED),
    "anti-tied GPT-2": (lambda: gpt2(opposed), UNRELATED),
    "OV = tau QK, not transposed": (lambda: gpt2(transposed), UNRELATED),
    "positive QK, free OV": (lambda: gpt2(positive), POSITIVE),
    "negative QK": (lambda: gpt2(negative), POSITIVE | {"qk_geometry": {"refuted"}, "link": {"refuted"}}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_models_decide_the_claims_about_them(name):
    build, expected = PLANTED[name]
    inputs = [batch.inputs for batch in token_batches(matrices.VOCABULARY, rows=48, length=48, batches=1)]
    findings = probe(seeded(build), None, inputs, predictions=CLAIMS, draws=10)
    verdicts = {claim.prediction: claim.verdict for claim in findings.claims if claim.prediction != "identity"}
    assert {claim: verdict for claim, verdict in verdicts.items() if verdict not in expected[claim]} == {}
    assert set(verdicts.values()) <= set(TESTED)
