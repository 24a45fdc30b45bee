"""Mergeable sufficient statistics of a corpus, in memory that does not grow with it.

hash_of         hashes of names: group_of, token_hashes, bootstrap_weights; stream_seed of random generators
Sums            scalars, bootstrapped over documents; mean, ratio, variance, correlation
Comoments       matrices in eight groups of documents; GroupMoments, jackknife, affine_fit, affine_fits
Histogram       counts between fixed edges; quantiles
Sample          the tokens with the smallest hashes
ascending       sorted values
Estimate        a value with its confidence interval, from replicates; interval_of, median_estimate, p_values, facing,
                benjamini_hochberg, majority_p_value; prediction_band of one more draw
merge           two states into one
"""

from .comoments import Comoments, GroupMoments, comoments_of, jackknife, jackknifed
from .estimates import (
    Estimate,
    benjamini_hochberg,
    facing,
    interval_of,
    majority_p_value,
    median_estimate,
    p_values,
    prediction_band,
)
from .hashing import GROUPS, REPLICATES, bootstrap_weights, group_of, hash_of, stream_seed, token_hashes
from .histogram import Histogram, histogram_of, quantiles
from .merging import merge
from .regression import Fit, affine_fit, affine_fits, solve
from .sample import SAMPLE, Sample, chosen, sample_of
from .sorting import ascending
from .sums import (
    DocumentWeights,
    Sums,
    bootstrap,
    correlation,
    documents,
    mean,
    moment_columns,
    ratio,
    sums_of,
    variance,
)

__all__ = [
    "GROUPS",
    "REPLICATES",
    "hash_of",
    "group_of",
    "stream_seed",
    "token_hashes",
    "bootstrap_weights",
    "Sums",
    "DocumentWeights",
    "sums_of",
    "moment_columns",
    "bootstrap",
    "documents",
    "mean",
    "median_estimate",
    "ratio",
    "variance",
    "correlation",
    "Comoments",
    "GroupMoments",
    "comoments_of",
    "jackknife",
    "jackknifed",
    "affine_fit",
    "affine_fits",
    "Fit",
    "solve",
    "Histogram",
    "histogram_of",
    "quantiles",
    "SAMPLE",
    "Sample",
    "chosen",
    "sample_of",
    "ascending",
    "Estimate",
    "interval_of",
    "benjamini_hochberg",
    "majority_p_value",
    "p_values",
    "facing",
    "prediction_band",
    "merge",
]
