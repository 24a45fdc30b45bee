"""Placement of a batch: on the device of the model, with all inputs that the model requires.

Read next: ../corpus/batching.py (batches), batch_statistics.py (the pass of one batch).
"""

import inspect

import torch
from torch import nn

from ..corpus.batching import Batch
from ..inside.offloading import device_of


def placed(batch: Batch, model: nn.Module) -> Batch:
    """Return the batch on the device of a model; the decoder of an encoder-decoder reads the text shifted by one."""
    device = device_of(model)
    inputs = {name: t.to(device, non_blocking=True) for name, t in batch.inputs.items()}
    config = getattr(model, "config", None)
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters and "input_ids" in inputs
    if decodes and getattr(config, "is_encoder_decoder", False):
        ids = inputs["input_ids"]
        known = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
        start = next((token for token in known if token is not None), 0)
        inputs["decoder_input_ids"] = torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), 1)
    return batch._replace(inputs=inputs, keys=batch.keys.to(device))
