"""Sufficient statistics that merge: what the probe keeps of a corpus, in memory that does not grow with it.

hash_of         names to numbers: group_of, token_hashes, bootstrap_weights
Sums            scalars under the bootstrap over documents; mean, ratio, variance, correlation
Comoments       matrices in eight groups of documents; Moments, jackknife, affine_fit
Histogram       with fixed edges; quantiles
Sample          the tokens of least hash
Estimate        a value with its interval; p_value, permutation_p, benjamini_hochberg
merge           two states into that of both; to_tensors and from_tensors for files
"""

from ...special.distributions import student_p, student_quantile
from .comoments import Comoments, Moments, comoments_of, jackknife, jackknifed
from .estimates import Estimate, benjamini_hochberg, p_value, permutation_p
from .hashing import GROUPS, REPLICATES, bootstrap_weights, group_of, hash_of, token_hashes
from .histogram import Histogram, histogram_of, quantiles
from .regression import Fit, affine_fit, solve
from .sample import SAMPLE, Sample, chosen, sample_of
from .storage import from_tensors, merge, to_tensors
from .sums import Sums, bootstrap, correlation, documents, mean, moment_columns, ratio, sums_of, variance

__all__ = [
    "GROUPS",
    "REPLICATES",
    "hash_of",
    "group_of",
    "token_hashes",
    "bootstrap_weights",
    "Sums",
    "sums_of",
    "moment_columns",
    "bootstrap",
    "documents",
    "mean",
    "ratio",
    "variance",
    "correlation",
    "Comoments",
    "Moments",
    "comoments_of",
    "jackknife",
    "jackknifed",
    "affine_fit",
    "Fit",
    "solve",
    "Histogram",
    "histogram_of",
    "quantiles",
    "SAMPLE",
    "Sample",
    "chosen",
    "sample_of",
    "Estimate",
    "p_value",
    "student_p",
    "student_quantile",
    "permutation_p",
    "benjamini_hochberg",
    "merge",
    "to_tensors",
    "from_tensors",
]
