"""The probe on the GPU: the statistics of the CPU, and a host that waits for the device by batches, not by layers."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gradlogz.probing.corpus.batching import Batch
from gradlogz.probing.inside.discovery import discover
from gradlogz.probing.passes.batch_statistics import statistics_of
from gradlogz.probing.passes.placement import placed
from gradlogz.probing.predictions import known_predictions
from gradlogz.probing.run_probe import chosen
from gradlogz.probing.statistics import GROUPS, merge
from support.probe_models import tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model(layers):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=144, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def batches(count=2):
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        ids = torch.randint(3, 200, (4, 64), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, 40:] = 0
        keys = torch.randint(0, 2**62, (4,), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": mask}
        found.append(
            Batch(inputs, keys, i % GROUPS, [f"{i} {row}" for row in range(4)], torch.zeros(4, dtype=torch.int64))
        )
    return found


def state_of(one, wanted):
    layout, state = discover(one, placed(batches(1)[0], one).inputs), {}
    for batch in batches():
        state = merge(state, statistics_of(one, layout, placed(batch, one), wanted)[0])
    return state


@pytest.mark.parametrize("name", [p.name for p in known_predictions()])
def test_the_statistics_are_those_of_the_cpu(name):
    wanted = chosen([name])
    here, there = (tensors_of(state_of(one, wanted)) for one in (model(2), model(2).cuda()))
    assert here.keys() == there.keys()
    for key, expected in here.items():
        if expected.is_floating_point():
            pair = [t.double() for t in (there[key], expected)]
            if expected.ndim == 4:  # ranges of entropy, between which a row may lie
                pair = [t.sum(2) for t in pair]
            size = max(float(pair[1].abs().max()), 1e-3)  # means of centred keys are 0 but for rounding
            assert float((pair[0] - pair[1]).abs().max()) <= 1e-3 * size, key


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", [p.name for p in known_predictions()])
def test_the_host_does_not_wait_for_each_layer(name):
    counts = []
    for layers in (2, 5):
        one = model(layers).cuda()
        (batch,) = (placed(b, one) for b in batches(1))
        layout = discover(one, batch.inputs)
        statistics_of(one, layout, batch, chosen([name]))  # what is made once and kept
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as met:
                warnings.simplefilter("always")
                statistics_of(one, layout, batch, chosen([name]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(w.message) for w in met))
    assert counts[0] == counts[1], counts
