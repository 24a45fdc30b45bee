"""Random queries of equal logit variance: the second null of the entropy of heads.

    entropy       = log n - Var(s) / 2 + ...      of the logits s of a row, to second order: it follows their variance
    null          the keys of the head and the logit variance of every row, with random queries: c q', c² Var <q', k> =
                  Var <q, k>

Read next: ../entropy.py, which uses it; ../../passes/rotated_heads.py (the queries).
"""

import math
from collections.abc import Sequence

from ...hypothesis_tests import against_null, median_detail
from ...runs.records import Detail, Finding, Remark
from ...statistics import benjamini_hochberg

ABOVE_KEPT = "above_kept"  # key of a detail
WITHOUT_NULLS = "without_nulls"  # key of a remark
NO_NULLS = (
    "{heads:.0f} heads lack a null value and are inconclusive: cross-attention, learned sinks, layers that compute "
    "their own logits, or a run without draws."
)

EQUAL_VARIANCE = (
    "The matched baseline keeps the spectra of the QK matrices and the tokens, not the variance of the logits: query "
    "and key matrices that both follow the principal axes of the tokens lower the entropy, related to each other and "
    "trained or not. To second order the entropy of a row is log n - Var(s) / 2, with the variance of its logits s "
    "over the visible keys. In the second null every row has the keys and the logit variance of the model, and a "
    "random query: queries of the matched draws, among the keys of the head itself, rescaled row by row. What differs "
    "is the distribution of the logits at equal variance: a head is below this null if few keys stand out from the "
    "others. Null value: the value of the model plus the mean difference over draws, each measured on the windows of "
    "the draw; band: 95 % prediction band of one more draw. Layers with learned sinks have no such null and are "
    "inconclusive. With a soft cap the variance before the cap is kept."
)
BOTH_NULLS = (
    "Each difference to a null is tested against 0 with the sampling error of the value and the variance over draws; "
    "its size is the effect. Scale explains a head that is beyond one null only, so both must be passed: the larger of "
    "both p-values counts, which tests at the same level that both differences exist [berger82]."
)


def details_of_kept(findings: Sequence[Finding], quantity: str) -> list[Detail]:
    """Median value and null at equal logit variance, and the numbers of heads below and above, at FDR 5 %."""
    rows = [f for f in findings if f.quantity == quantity and f.tokens]
    if not rows:
        return []
    above, below = (int(benjamini_hochberg(p).sum()) for p in against_null(rows))
    median = median_detail(quantity, rows, quantity)
    return [median._replace(count=below, total=len(rows)), Detail(ABOVE_KEPT, count=above, total=len(rows))]


def remarks_without_nulls(findings: Sequence[Finding], *quantities: str) -> list[Remark]:
    """The number of heads that lack a null value of one of the quantities, if there are any."""
    lacking = {
        (f.layer, f.call, f.head) for f in findings if f.quantity in quantities and f.tokens and math.isnan(f.null_high)
    }
    return [Remark(WITHOUT_NULLS, {"heads": len(lacking)})] if lacking else []
