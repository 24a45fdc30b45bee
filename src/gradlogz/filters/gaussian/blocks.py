"""One long series, filtered in blocks of time that run in parallel as if they were targets.

    block i        steps iB+1 ... iB+B, from the state after the `overlap` steps before them
    discrepancy    between the state that a block begins with and the one that the block before ends with
    repair         blocks with a discrepancy above the tolerance run again, from the end of the block before

A filter forgets: states of the same observations from different starts approach each other. If every discrepancy is 0,
the result is that of the sequential filter; after r repairs the first r + 1 blocks are, so that repairs end. Blocks
fill the lanes of a vector, the threads of a CPU or of a GPU, which one series leaves idle.

Read next: switching.py (the filters).
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputTypeError, InputValueError, shape_of
from ..._typing import Float, Tensor
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..prior_and_series import Prior, Series, as_series
from ..results import Filtered, FilterState
from ..validation import PreparedSeries, initial_state, prepared
from .switching import SwitchingFilter, filter_from


class BlockFiltered(NamedTuple):
    """Result of `filter_in_blocks`.

    Attributes:
        filtered: the requested fields for all steps, and the log likelihood of the series.
        discrepancy: for each block but the first, the largest difference between the state that it begins with and the
            one that the block before ends with: of means in standard deviations, of covariances in products of them,
            and of mode probabilities.
        repairs: how often blocks were run again.
    """

    filtered: Filtered
    discrepancy: Float[Tensor, "n"]
    repairs: int


@without_autocast
def filter_in_blocks(
    model: SwitchingModel,
    observations: Float[Tensor, "t o"] | Series,
    prior: Prior,
    *,
    method: Literal["imm", "gpb2"] = "imm",
    block: int = 1024,
    overlap: int = 256,
    tolerance: float = 1e-9,
    fields: Collection[str] | None = ("mean", "covariance", "log_mode_probability"),
) -> BlockFiltered:
    """Filter one long series with imm or gpb2, blocks of time in parallel.

    The result is that of the sequential filter, up to the discrepancy at the starts of blocks, which is measured, and
    which the filter forgets within a block as it does any other start. With tolerance=0 blocks are repaired until
    nothing changes.

    Args:
        observations: one series [t, o], with any options of `Series` but lengths.
        method: "imm" or "gpb2". With one mode both are the Kalman filter.
        block: steps of a block.
        overlap: steps before a block from which its first state is estimated, starting with the prior; as many as the
            filter needs to forget it.
        tolerance: largest discrepancy that is not repaired.
        fields: names of the fields of `Filtered` to return; None for all.

    Cost: (1 + overlap / block) times the steps of the filter, plus those of repaired blocks.
    Law: tests/laws/test_blocks_of_time_are_the_series.py.

    >>> import torch
    >>> from gradlogz.filters import constant_velocity, imm
    >>> line = constant_velocity(1, dt=1.0, spectral_density=0.1, observation_variance=1.0, dtype=torch.float64)
    >>> model = SwitchingModel.of([line], transition=torch.ones(1, 1, dtype=torch.float64))
    >>> prior = Prior(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    >>> y = torch.randn(5000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> result = filter_in_blocks(model, y, prior)
    >>> torch.allclose(result.filtered.mean, imm(model, y, prior).mean, rtol=0, atol=1e-8), result.repairs
    (True, 0)
    """
    call, series = "filter_in_blocks", as_series(observations)
    if not isinstance(model, SwitchingModel) or model.components is not None:
        problem = f"model must be a SwitchingModel without components, got {type(model).__name__}"
        raise InputTypeError(call, "model", problem, "Use imm or gpb2 for other models.")
    if series.observations.ndim != 2 or series.lengths is not None:
        problem = f"observations must be one series [t, o] without lengths, got shape {shape_of(series.observations)}"
        raise InputValueError(call, "observations", problem, "Use imm or gpb2 for many series: they are parallel.")
    if method not in ("imm", "gpb2"):
        raise InputValueError(call, "method", f'method must be "imm" or "gpb2", got {method!r}', 'Use "imm" for speed.')
    if block < 1 or not 0 <= overlap <= block:
        problem = f"block must be at least 1 and overlap from 0 to block, got block={block} and overlap={overlap}"
        raise InputValueError(call, "block", problem, "Use block=1024 and overlap=256.")
    if not tolerance >= 0:
        problem = f"tolerance must be a number from 0, got {tolerance}"
        raise InputValueError(call, "tolerance", problem, "Use 0 for the result of the sequential filter.")
    steps = series.observations.shape[0]
    chosen = SwitchingFilter(model) if method == "imm" else SwitchingFilter(model, "gpb")
    first = initial_state(call, model, prior, torch.Size())
    blocks = _blocks(prepared(call, model, series, validate=model.validate), block)
    count = len(blocks.observations)
    starts = FilterState(*(t.expand(count, *t.shape) for t in first))
    if overlap and count > 1:
        before = _selected(blocks, slice(count - 1), slice(block - overlap, block))
        reached = filter_from(call, chosen, before, starts[1:], ())[0]
        starts = _from_end(starts, torch.arange(1, count, device=starts.mean.device), reached)
    ends, filtered = filter_from(call, chosen, blocks, starts, fields)
    repairs, discrepancy = 0, _difference(starts[1:], ends[:-1])
    while bool((discrepancy > tolerance).any()):
        before_wrong = (discrepancy > tolerance).nonzero().flatten()
        wrong = before_wrong + 1
        starts = _from_end(starts, wrong, ends[before_wrong])
        again, result = filter_from(call, chosen, _selected(blocks, wrong, slice(None)), starts[wrong], fields)
        ends = FilterState(*(t.index_copy(0, wrong, new) for t, new in zip(ends, again, strict=True)))
        parts = zip(filtered, result, strict=True)
        filtered = Filtered._make([None if t is None else t.index_copy(0, wrong, new) for t, new in parts])
        repairs, discrepancy = repairs + 1, _difference(starts[1:], ends[:-1])
    series_fields: dict[str, Any] = {
        n: None if t is None else t.flatten(0, 1)[:steps]
        for n, t in filtered._asdict().items()
        if n != "log_likelihood"
    }
    total = filtered.log_likelihood.sum()
    return BlockFiltered(Filtered(**series_fields, log_likelihood=total), discrepancy, repairs)


def _blocks(series: PreparedSeries, block: int) -> PreparedSeries:
    """Steps as [blocks, steps of a block, ...]; the last block is filled up with steps without observations."""
    parameters, y, observed = series
    steps = len(y)
    missing = -steps % block

    def split(t: Tensor) -> Tensor:
        padded = torch.cat((t, t[-1:].expand(missing, *t.shape[1:]))) if missing else t
        return padded.unflatten(0, (-1, block))

    if missing and observed is None:
        observed = torch.ones_like(y, dtype=torch.bool)
    if observed is not None:
        observed = split(observed)
        observed.view(-1, y.shape[-1])[steps:] = False
    fields = {}
    for name, t in parameters._asdict().items():
        changes = t is not None and t.ndim == len(ENDS[name]) + 1 and len(t) == steps > 1
        fields[name] = split(t) if changes else t
    return PreparedSeries(Parameters(**fields), split(y), observed)


def _selected(blocks: PreparedSeries, which: Tensor | slice, when: slice) -> PreparedSeries:
    """Some steps of some blocks."""
    parameters, y, observed = blocks
    fields = {
        name: t[which][:, when] if t is not None and t.ndim == len(ENDS[name]) + 2 else t
        for name, t in parameters._asdict().items()
    }
    return PreparedSeries(
        Parameters(**fields), y[which][:, when], None if observed is None else observed[which][:, when]
    )


def _from_end(starts: FilterState, which: Tensor, end: FilterState) -> FilterState:
    """States in which some blocks begin with the end of others; their log likelihood starts at 0."""
    moments = zip(tuple(starts)[:3], tuple(end)[:3], strict=True)
    m, P, log_pi = (t.index_copy(0, which, new) for t, new in moments)
    return FilterState(m, P, log_pi, starts.log_likelihood)


def _difference(one: FilterState, other: FilterState) -> Float[Tensor, "n"]:
    """Largest difference of two states of each block, relative to the standard deviations of the second."""
    deviation = other.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    tiny = torch.finfo(deviation.dtype).tiny
    product = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    parts = (
        (one.mean - other.mean).abs() / deviation.clamp(min=tiny),
        (one.covariance - other.covariance).abs() / product.clamp(min=tiny),
        (one.log_probability.exp() - other.log_probability.exp()).abs(),
    )
    return (
        torch.stack([part.flatten(1).amax(-1) for part in parts]).amax(0) if len(one.mean) else deviation.new_zeros(0)
    )
