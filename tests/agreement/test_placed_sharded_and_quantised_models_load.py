"""Models in several files, on a device map, or quantised compute what their tensors say, and are never moved."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gradlogz
from gradlogz._errors import InputRuntimeError
from gradlogz.probing.inside import loading
from gradlogz.probing.inside.loading import load
from gradlogz.probing.inside.random_models import with_random_weights
from support.saved_models import TEXTS, gpt2, llama, save, tokenizer

SCALE = 448.0  # the largest number of float8_e4m3fn


@pytest.fixture
def unmoved():
    """`.to` of every model is an error, as it is for quantised ones."""
    with mock.patch.object(nn.Module, "to", side_effect=AssertionError("the model was moved")):
        yield


def findings(loaded):
    return gradlogz.probe(
        loaded.model,
        loaded.tokenizer,
        TEXTS,
        name="model",
        tokens=None,
        baseline=0.0,
        predictions=["identity", "entropy"],
    )


def test_shards_are_one_model(tmp_path):
    folder = save(gpt2(), tmp_path / "shards", max_shard_size="8KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert not (folder / "model.safetensors").exists()
    loaded, whole = load(folder, device="cpu"), load(save(gpt2(), tmp_path / "whole"), device="cpu")
    expected = gpt2().state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in loaded.model.state_dict().items())
    assert findings(loaded).csv() == findings(whole).csv()


@pytest.mark.usefixtures("unmoved")
@pytest.mark.parametrize(
    "placement", ["auto", "cpu", {"": "cpu"}, '{"": "cpu"}', {"transformer": "cpu", "lm_head": "cpu"}]
)
def test_a_device_map_places_the_model(tmp_path, placement):
    folder = save(gpt2(), tmp_path / "model", max_shard_size="8KB")
    loaded = load(folder, device_map=placement)
    expected = gpt2().state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in loaded.model.state_dict().items())
    assert findings(loaded).summary()[0].verdict == "passed"  # identity


OTHERS = {
    gpt2: [f"transformer.{part}" for part in ("wte", "wpe", "drop", "ln_f")],
    llama: [f"model.{part}" for part in ("embed_tokens", "norm", "rotary_emb")],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("make", "layers"), [(gpt2, "transformer.h"), (llama, "model.layers")])
def test_weights_on_the_disk_are_the_weights(tmp_path, make, layers, dtype):
    folder = save(make(), tmp_path / "model", max_shard_size="8KB")
    places = {f"{layers}.{i}": "disk" for i in range(2)} | dict.fromkeys([*OTHERS[make], "lm_head"], "cpu")
    places[OTHERS[make][-1 if make is gpt2 else 1]] = "disk"  # the last norm
    memory = load(folder, device="cpu", dtype=dtype)
    disk = load(folder, device_map=places, dtype=dtype)
    assert "meta" in {p.device.type for p in disk.model.parameters()}
    assert disk.facts == memory.facts
    with pytest.raises(ValueError, match="offloaded"):
        with_random_weights(disk.model, seed=0)
    options = {"name": "model", "tokens": None, "draws": 4}
    found, expected = (gradlogz.probe(each.model, each.tokenizer, TEXTS, **options) for each in (disk, memory))
    assert len(found.rows) == len(expected.rows) > 200
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row[:6] == other[:6]
        torch.testing.assert_close(torch.tensor(row[6:9]), torch.tensor(other[6:9]), rtol=0, atol=0, equal_nan=True)
    effects = [
        gradlogz.intervene(each.model, each.tokenizer, TEXTS, tokens=100, fit_tokens=100).rows
        for each in (disk, memory)
    ]
    assert effects[0] == effects[1]


def test_one_device_is_no_map(tmp_path):
    with mock.patch.object(loading, "_model", wraps=loading._model) as made:
        load(save(gpt2(), tmp_path / "model"), device="cpu")
    assert torch.device("cpu") in made.call_args.args


def quantised(folder):
    """Replace the projections of a saved Llama by 8-bit floats, with one scale each; return the products."""
    file = folder / "model.safetensors"
    tensors, products = load_file(file), {}
    for name in [name for name in tensors if "proj" in name]:
        scale = tensors[name].abs().max() / SCALE
        numbers = (tensors[name] / scale).to(torch.float8_e4m3fn)
        products[name] = numbers.float() * scale
        tensors |= {name: numbers, f"{name}_scale_inv": scale.reshape(1, 1)}
    save_file(tensors, file, metadata={"format": "pt"})
    return products


def quantisation(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.usefixtures("unmoved")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in 8 bits, a CPU dequantises")
def test_a_model_of_8_bit_floats_is_the_product_with_its_scales(tmp_path):
    folder = save(llama(), tmp_path / "fp8")
    products = quantised(folder)
    quantisation(folder, quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
    loaded = load(folder)
    state = loaded.model.state_dict()
    assert len(products) == 2 * 7
    for name, product in products.items():
        torch.testing.assert_close(state[name], product, rtol=1e-6, atol=0.0)
        assert not torch.equal(product, llama().state_dict()[name])
    assert loaded.facts["dequantised"]
    assert findings(loaded).summary()[0].verdict == "passed"


@pytest.mark.usefixtures("unmoved")
def test_a_model_that_stays_quantised_is_probed(tmp_path):
    from transformers.integrations.bitnet import pack_weights

    folder = save(llama(), tmp_path / "bits")
    tensors, ternary = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name]:
        scale = tensors[name].abs().mean()
        ternary[name] = (tensors[name] / scale).round().clamp(-1, 1)
        tensors |= {name: pack_weights(ternary[name].clone()), f"{name}_scale": (1 / scale).reshape(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantisation(folder, quant_method="bitnet", linear_class="bitlinear", quantization_mode="offline")
    loaded = load(folder, device="cpu")
    weight = loaded.model.model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == torch.uint8
    assert not loaded.facts["dequantised"]
    assert findings(loaded).summary()[0].verdict == "passed"


class InBytes(torch.Tensor):
    """A matrix in 8 bits with one scale, as packages of quantisations have them: a tensor with products of its own."""

    @classmethod
    def of(cls, matrix):
        scale = matrix.abs().max() / 127
        made = torch.Tensor._make_subclass(cls, (matrix / scale).round().to(torch.int8))
        made.scale = scale
        return made

    def dequantize(self):
        return self.as_subclass(torch.Tensor).float() * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].dequantize(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def in_bytes(model):
    for module in (m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)):
        matrix = module._parameters.pop("weight").detach()
        module.weight = InBytes.of(matrix)
    model.is_quantized = True
    return model


def test_quantised_matrices_of_a_loaded_model_become_plain_ones(tmp_path):
    """transformers leaves some packages to dequantise their own tensors; products of those are as before."""
    folder, model = save(llama(), tmp_path / "bytes"), in_bytes(llama())
    expected = {n: m.weight.dequantize() for n, m in model.named_modules() if type(getattr(m, "weight", 0)) is InBytes}
    assert len(expected) == 2 * 7
    model.dequantize = mock.Mock(side_effect=NotImplementedError)
    with mock.patch.object(loading, "_model", return_value=(model, [])), mock.patch.object(loading, "_is_quantised"):
        loaded = load(folder, device="cpu")
    for name, matrix in expected.items():
        weight = loaded.model.get_submodule(name).weight
        assert type(weight) is torch.nn.Parameter
        assert torch.equal(weight, matrix)
        assert not torch.equal(weight, llama().get_submodule(name).weight)
    assert loaded.facts["dequantised"]
    assert findings(loaded).summary()[0].verdict == "passed"


def test_quantised_products_without_derivatives_are_refused():
    model = llama()
    model.is_quantized = True
    for layer in model.model.layers:
        forward = layer.self_attn.q_proj.forward
        layer.self_attn.q_proj.forward = lambda x, forward=forward: forward(x).detach()
    with pytest.raises(InputRuntimeError, match="quantised layers") as caught:
        gradlogz.probe(model, tokenizer(), TEXTS, tokens=None, predictions=["ascent"])
    assert "before quantisation" in str(caught.value)
