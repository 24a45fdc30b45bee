"""Statistics of shards, merged in any order, are those of one pass over the whole corpus."""

import functools
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlogz.probing.statistics import (
    GROUPS,
    Comoments,
    Sums,
    chosen,
    comoments_of,
    group_of,
    hash_of,
    histogram_of,
    merge,
    sample_of,
    sums_of,
    token_hashes,
)
from support.measure_registry import Source, seeds
from support.probe_models import tensors_of
from support.scales import close

EDGES = torch.linspace(-2.0, 2.0, 9, dtype=torch.float64)
SIZE = 20


def corpus(seed, documents=12, tokens=9):
    """Documents of two heads of queries x and values y, far from the origin, with a hash for each token."""
    s = Source(seed)
    keys = torch.tensor([hash_of(f"document {seed} {i}") for i in range(documents)])
    x, y = s.normal(documents, 2, tokens, 3) + 100, s.normal(documents, 2, tokens, 2) - 30
    positions = torch.arange(tokens).expand(documents, tokens)
    return keys, x, y, token_hashes(keys, positions)


def state_of(keys, x, y, hashes, rows):
    """What a shard of some documents adds, batch by batch: a batch is of documents of one group."""
    state = None
    for group in range(GROUPS):
        inside = [i for i in rows if group_of(int(keys[i])) == group]
        if inside:
            heads_x, heads_y = (t[inside].transpose(0, 1).flatten(1, 2) for t in (x, y))
            of_tokens = hashes[inside].flatten()
            first = x[inside, 0]
            picked = chosen(of_tokens, size=SIZE)
            columns = torch.stack((torch.ones_like(x[inside, ..., 0]), x[inside, ..., 0], y[inside, ..., 0]), -1)
            batch = {
                "sums": sums_of(columns.sum(-2), keys[inside]),
                "layer/0": {
                    yy: comoments_of(heads_x, heads_y, group=group, yy=yy) for yy in ("full", "diagonal", "trace")
                },
                "alone": comoments_of(heads_x, group=group),
                "histogram": histogram_of(heads_x[..., 0] - 100, EDGES),
                "sample": sample_of({"x": first.flatten(0, 1)[picked]}, of_tokens[picked], size=SIZE),
                "scale": 0.125,
            }
            state = merge(state, batch)
    return state


def flat(state):
    return tensors_of(state)


def same(one, other, tolerance=1e-10):
    """Equal up to rounding; the hashes, the counts and the sampled vectors to the last bit."""
    assert set(one) == set(other)
    for name, t in one.items():
        exact = t.dtype == torch.int64 or "sample" in name
        if exact:
            assert torch.equal(t, other[name]), name
        else:
            # Means of 100 and variances of 1: what is lost is measured by the size of the tensor as a whole.
            close(t, other[name], other[name].abs().max() + 1.0, tolerance=tolerance)


@given(seed=seeds, cuts=st.integers(1, 6), order=st.randoms(use_true_random=False))
def test_shards_in_any_order_are_one_pass(seed, cuts, order):
    data = corpus(seed)
    rows = list(range(12))
    order.shuffle(rows)
    shards = [state_of(*data, rows[i::cuts]) for i in range(cuts)]
    order.shuffle(shards)
    same(flat(functools.reduce(merge, shards)), flat(state_of(*data, range(12))))


@given(seed=seeds)
def test_merging_is_associative_and_commutative(seed):
    data = corpus(seed)
    a, b, c = (state_of(*data, range(i, 12, 3)) for i in range(3))
    left = flat(merge(merge(a, b), c))
    same(flat(merge(a, merge(b, c))), left)
    same(flat(merge(merge(c, a), b)), left)


def test_nothing_is_neutral():
    data = corpus(0)
    whole = state_of(*data, range(12))
    for state in (merge(None, whole), merge(whole, None), merge({}, whole)):
        same(flat(state), flat(whole), tolerance=0.0)
    assert merge(None, None) is None


def test_a_batch_of_padding_adds_nothing():
    s = Source(0)
    x, y = s.normal(2, 7, 3) + 100, s.normal(2, 7, 2)
    seen = comoments_of(x, y, group=3)
    padding = comoments_of(x * torch.nan, y * torch.nan, group=3, weights=torch.zeros(7, dtype=torch.bool))
    for both in (merge(seen, padding), merge(padding, seen)):
        same(flat(both), flat(seen), tolerance=0.0)
    elsewhere = merge(seen, padding._replace(groups=(padding.groups[3], *(None,) * 7)))
    assert elsewhere.present() == [3]
    same(flat(elsewhere.total()), flat(seen.total()), tolerance=1e-15)
    assert padding.present() == []
    assert float(padding.total().tokens) == 0
    empty = sums_of(torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(empty.totals, torch.zeros(201, 2, 3, dtype=torch.float64))


def test_a_document_in_two_batches_has_the_same_weights_as_in_one():
    keys = torch.tensor([hash_of("a"), hash_of("b")])
    values = Source(0).normal(2, 4, 2)
    apart = merge(sums_of(values * 0.25, keys), sums_of(values.flip(0) * 0.75, keys.flip(0)))
    close(apart.totals, sums_of(values, keys).totals, 10.0)


def test_the_sample_is_the_tokens_of_least_hash_whatever_the_order():
    """Bit for bit, also when batches are first thinned by the threshold of the sample so far."""
    keys = torch.tensor([hash_of(f"{i}") for i in range(40)])
    hashes = token_hashes(keys, torch.arange(5, 12).expand(40, 7))
    x = Source(0).normal(40, 7, 3)
    least = hashes.flatten().sort()
    expected = x.flatten(0, 1)[least.indices[:SIZE]]
    for seed in range(5):
        rows, sample = list(range(40)), None
        random.Random(seed).shuffle(rows)
        for i in range(0, 40, 7):
            part = rows[i : i + 7]
            below = {} if sample is None else {"below": sample.threshold}
            picked = chosen(hashes[part].flatten(), size=SIZE, **below)
            assert sample is None or bool((hashes[part].flatten()[picked] < sample.threshold).all())
            new = sample_of({"x": x[part].flatten(0, 1)[picked]}, hashes[part].flatten()[picked], size=SIZE)
            sample = merge(sample, new)
        assert torch.equal(sample.hashes, least.values[:SIZE])
        assert torch.equal(sample.vectors["x"], expected)
        assert torch.equal(merge(sample, sample).vectors["x"], expected)


def test_padding_is_never_sampled():
    hashes = torch.arange(10)
    rows = chosen(hashes, valid=hashes >= 4, below=9, size=3)
    assert sorted(rows.tolist()) == [4, 5, 6]
    assert chosen(hashes, valid=hashes >= 4, below=6).tolist() == [4, 5]


class Record(NamedTuple):
    """What a prediction keeps of a layer: statistics, nested ones, constants, or nothing."""

    sums: Sums | None = None
    parts: dict[int, Sums] | None = None
    heads: int | None = None


def test_named_tuples_merge_field_by_field():
    keys, values = torch.tensor([hash_of("a"), hash_of("b")]), Source(0).normal(2, 3)
    one, other = sums_of(values, keys), sums_of(2 * values, keys)
    both = merge({"layer": Record(one, {0: one}, 4)}, {"layer": Record(other, {1: other}), "end": Record()})
    assert both["end"] == Record()
    assert both["layer"].heads == 4
    assert both["layer"].parts == {0: one, 1: other}
    assert torch.equal(both["layer"].sums.totals, one.merge(other).totals)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [127, 128, 200, 577])
def test_wide_matrices_keep_little_more_than_half(p, dtype):
    """Blocks on and above the diagonal: the products of the definition, symmetric to the last bit."""
    s = Source(p, dtype)
    x, y = s.normal(3, 700, p) + 10, s.normal(3, 700, 5)
    seen = s.normal(3, 700) > -1
    parts = [comoments_of(x[i], y[i], group=i % 2, weights=seen[i]) for i in range(3)]
    found = functools.reduce(merge, parts)
    wide = torch.cat([x[i][seen[i]] for i in range(3)]).double()
    centred = wide - wide.mean(0)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    close(found.total().xx, centred.mT @ centred, scale=float((centred.mT @ centred).abs().max()), tolerance=tolerance)
    assert torch.equal(found.total().xx, found.total().xx.mT)
    alone = torch.cat([x[i][seen[i]] for i in (0, 2)]).double()
    alone = alone - alone.mean(0)
    close(found.groups[0].covariance, alone.mT @ alone / len(alone), scale=10.0, tolerance=tolerance)
    kept = found.groups[0].xx.numel() / p**2
    assert kept == 1 if p < 128 else kept < {128: 0.76, 200: 0.68, 577: 0.57}[p]
    whole = Comoments(tuple(None if group is None else group.unpacked for group in parts[2].groups))
    close(merge(parts[0], whole).total().xx, merge(parts[0], parts[2]).total().xx, scale=1e3)


def test_what_two_predictions_share_is_kept_once():
    s = Source(0)
    batches = [comoments_of(s.normal(30, 4), group=0) for _ in range(3)]
    state = functools.reduce(merge, ({"one": {"layer": each}, "two": {"again": each}} for each in batches))
    assert state["one"]["layer"] is state["two"]["again"]
    close(state["one"]["layer"].total().xx, functools.reduce(merge, batches).total().xx)
    other = merge(state, {"one": {"layer": batches[0]}})
    assert other["one"]["layer"] is not other["two"]["again"]
