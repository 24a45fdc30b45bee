"""A model of transformers that is exported computes what the trained one does; `gradlogz probe` reads it."""

from dataclasses import replace

import pytest
import torch

from experiments.exporting import export, load_checkpoint
from experiments.run_folders import RunFolder
from experiments.transformer import ModelSettings, Transformer
from gradlogz._errors import InputValueError
from gradlogz.probing.inside.loading import load

MODEL = ModelSettings(vocabulary=30, context=12, width=16, heads=2, layers=2, hidden=24)
VARIANTS = [
    replace(MODEL, attention=attention, placement=placement, objective=objective, shared=shared)
    for attention in ("softmax", "tied")
    for placement in ("pre", "post")
    for objective in ("causal", "masked")
    for shared in (False, True)
] + [replace(MODEL, separate=True), *(replace(MODEL, activation="relu", placement=p) for p in ("pre", "post"))]


def perturbed(settings):
    """A model whose biases and gains are not those of the start."""
    model = Transformer(settings, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_probe_loads_a_model_that_computes_the_same(settings, tmp_path):
    model = perturbed(settings)
    export(model, tmp_path)
    loaded = load(tmp_path).model
    tokens = torch.randint(2, 30, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output = loaded(tokens)
        if settings.placement == "pre" and settings.objective == "causal":
            expected, actual = model(tokens), output.logits
        else:
            expected, actual = model.stream(tokens), output.last_hidden_state
    assert torch.allclose(expected, actual, atol=1e-5 * float(expected.abs().max()))


def test_a_checkpoint_is_read_again(tmp_path):
    model = perturbed(MODEL)
    folder = RunFolder(tmp_path).checkpoint(4, model.state_dict(), MODEL.as_dict())
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert torch.equal(load_checkpoint(folder, MODEL)(tokens), model(tokens))


@pytest.mark.parametrize(
    "change", [{"attention": "linear"}, {"contraction": "dyt"}, {"placement": "peri"}, {"feed_forward": "tied"}]
)
def test_parts_that_transformers_lacks_are_refused(change, tmp_path):
    with pytest.raises(InputValueError, match="model"):
        export(Transformer(replace(MODEL, **change), seed=0), tmp_path)
