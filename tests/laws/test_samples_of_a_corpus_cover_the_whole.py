"""Intervals of a sample of windows hold the value of the whole corpus in about 95 of 100 samples, through `batches`.

The corpus has short documents and long ones whose words drift from their beginning to their end, as those of real texts
do: a sample of beginnings has other means, variances and correlations than the whole.
"""

import functools
import math
import random
import string

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gradlogz.probing.corpus.batching import batches
from gradlogz.probing.corpus.text import Document
from gradlogz.probing.run_probe import evaluate, measure
from gradlogz.probing.statistics import (
    affine_fit,
    bootstrap,
    comoments_of,
    correlation,
    jackknife,
    mean,
    merge,
    moment_columns,
    sums_of,
)

WORDS = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
WINDOW, COLUMNS, SAMPLES = 32, 5, 60


@functools.cache
def tokenizer():
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: n for n, word in enumerate(WORDS, start=2)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=WINDOW
    )


@functools.cache
def corpus():
    """Ninety short documents and thirty of up to 25 windows; early and late words are of different kinds."""
    draw = random.Random(0)
    documents = []
    for i in range(120):
        length = draw.randint(6, WINDOW) if i % 4 else draw.randint(5 * WINDOW, 25 * WINDOW)
        topic = draw.sample(range(len(WORDS)), 40)
        early, late = [n for n in topic if n % 3 != 2], [n for n in topic if n % 3 != 0]
        words = [WORDS[draw.choice(late if draw.random() < j / (8 * WINDOW) else early)] for j in range(length)]
        documents.append(Document(f"document {i}", " ".join(words)))
    return documents


@functools.cache
def features():
    """Values of each word: its kind, which drifts within documents, and noise."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.tensor([0.0, 0.0, *(float(n % 3 - 1) for n in range(len(WORDS)))], dtype=torch.float64)
    noise = torch.randn(len(kind), COLUMNS, generator=generator, dtype=torch.float64)
    return kind.unsqueeze(-1) * torch.linspace(0.3, 1.0, COLUMNS, dtype=torch.float64) + noise


def estimates(reading):
    """Estimates of every kind: {name: (value, low, high)}, each [columns]."""
    state = {}
    for batch in reading:
        ids, valid = batch.inputs["input_ids"], batch.inputs["attention_mask"].bool()
        x = features()[ids]  # [b, n, columns]
        y = x.square() / 2 + x.roll(1, -1)
        columns = moment_columns(x.movedim(-1, 1), y.movedim(-1, 1), valid=valid)
        flat, other = x.flatten(0, 1), y.flatten(0, 1)
        part = {
            "sums": sums_of(columns, batch.keys),
            "moments": comoments_of(flat, other, group=batch.group, weights=valid.flatten(), yy="diagonal"),
        }
        state = merge(state, part)
    fit = affine_fit(state["moments"])
    return {
        "mean": bootstrap(mean, state["sums"]),
        "correlation": bootstrap(correlation, state["sums"]),
        "log variance": jackknife(lambda m: m.covariance.diagonal(dim1=-2, dim2=-1).log(), state["moments"]),
        "held-out R²": fit.held_out,
        "extrapolated R²": fit.extrapolated,
    }


def covered(readings):
    """Share of intervals that hold the value of the whole corpus, by kind of estimate."""
    truth = {name: e.value for name, e in estimates(batches(corpus(), tokenizer(), tokens=None)).items()}
    inside = {name: [] for name in truth}
    for reading in readings:
        for name, e in estimates(reading).items():
            inside[name].append(((e.low <= truth[name]) & (truth[name] <= e.high)).double().mean())
    return {name: float(torch.stack(each).mean()) for name, each in inside.items()}


# At least 51 of 60: 60 independent intervals of 95 % have fewer with probability 0.001. Intervals of several columns
# of one sample are not independent; the mean over them varies at most as much as one of them.
LEAST = 51 / 60


def test_intervals_of_samples_cover_the_whole_corpus():
    shares = covered(batches(corpus(), tokenizer(), tokens=3000, seed=seed) for seed in range(SAMPLES))
    assert min(shares.values()) >= LEAST, shares


def test_samples_of_beginnings_do_not():
    """The law has power: intervals of as many tokens from the beginnings of documents miss the whole corpus."""

    def beginnings(seed):
        chosen = random.Random(seed).sample(corpus(), 80)
        texts = [Document(d.name, " ".join(d.text.split()[: 2 * WINDOW])) for d in chosen]
        return batches(texts, tokenizer(), tokens=None)

    shares = covered(beginnings(seed) for seed in range(20))
    assert shares["mean"] < 0.6, shares


@pytest.mark.long
def test_every_interval_of_the_probe_covers_the_whole_corpus():
    """All predictions on a random transformer: of every judged quantity at least 51 of 60 samples, as above."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS) + 2, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": WINDOW}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(12.0 if p.ndim == 2 else 1.0)

    def rows(tokens, seed=0):
        found = evaluate(measure(model, tokenizer(), corpus(), tokens=tokens, seed=seed, baseline=0))
        return {row[1:6]: row for row in found.rows if row.verdict}

    truth = rows(None)
    inside: dict[tuple[str, str], list[float]] = {}
    for seed in range(SAMPLES):
        for place, row in rows(3000, seed).items():
            if place in truth and math.isfinite(row.low) and row.low < row.high:
                inside.setdefault((place[0], place[-1]), []).append(row.low <= truth[place].value <= row.high)
    shares = {name: sum(each) / len(each) for name, each in inside.items()}
    assert len(shares) > 5
    assert min(shares.values()) >= LEAST, shares
