"""Checkpoints in the format of transformers, which `gradlogz probe` and `gradlogz compare` read.

    python -m experiments.exporting RUN FOLDER      RUN: a folder with config.json and checkpoints/step-N
    gradlogz probe FOLDER --text TEXT               FOLDER/checkpoint-N: the same models, with the tokenizer of the text

    placement   objective   class of transformers
    pre         causal      GPT2LMHeadModel
    pre         masked      EsmModel, without a head
    post        causal      BertModel with is_decoder, without a head
    post        masked      BertModel, without a head

Attention is "softmax", or "tied", whose value and output matrices are written out: W_v = c_h W_k, W_o = W_q^T.
Contractions are LayerNorm and feed-forward layers free; other parts have no architecture of their own in transformers.

Read next: transformer.py; ../src/gradlogz/probing/inside/loading.py (how the folder is read).
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gradlogz._errors import InputValueError
from gradlogz._input_errors import InputError
from gradlogz.attention.layers.multihead import MultiheadAttention

from .parts import TiedAttention
from .run_folders import RunFolder
from .text import MASK_TOKEN, PAD_TOKEN
from .transformer import Block, ModelSettings, Transformer

PAD = 0  # id of the padding token, which no text contains


def can_be_exported(settings: ModelSettings) -> bool:
    """Return whether transformers has an architecture of these parts."""
    s = settings  # Shorthand
    return (
        s.attention in ("softmax", "tied")
        and s.contraction == "layer_norm"
        and s.feed_forward == "free"
        and s.placement != "peri"
    )


def export(model: Transformer, folder: Path, tokenizer: Path | None = None) -> Any:
    """Write a model as config.json and model.safetensors; return the model of transformers.

    Its hidden states equal those of the model; that of GPT-2 has the same logits.

    Args:
        tokenizer: tokenizer.json of the text, which is written beside the model.

    Law: tests/experiments/test_exported_models_compute_the_same.py.
    """
    s = model.settings
    if not can_be_exported(s):
        kinds = f"{s.attention} attention, {s.contraction} ({s.placement}) and {s.feed_forward} feed-forward layers"
        problem = f"no model of transformers has {kinds}"
        remedy = "Use softmax or tied attention, layer_norm, pre or post, and a free feed-forward layer."
        raise InputValueError("export", "model", problem, remedy)
    if s.placement == "post":
        exported = _bert(model)
    else:
        exported = _gpt2(model) if s.objective == "causal" else _esm(model)
    exported.save_pretrained(folder)
    if tokenizer is not None:
        from transformers import PreTrainedTokenizerFast

        special = {"pad_token": PAD_TOKEN, "mask_token": MASK_TOKEN}
        PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **special).save_pretrained(folder)
    return exported


def load_checkpoint(folder: Path, settings: ModelSettings) -> Transformer:
    """Return the model of a checkpoint of a run."""
    model = Transformer(settings, seed=0)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def export_run(run: Path, folder: Path, tokenizer: Path | None = None) -> list[Path]:
    """Write every checkpoint of a run to folder/checkpoint-STEP, and return these folders by step.

    tokenizer: tokenizer.json of the text; by default that of an experiment, text/tokenizer.json beside the run.
    """
    source = RunFolder(run)
    if source.config is None:
        raise InputValueError("export_run", "run", f"{run} has no config.json", "Name the folder of a run.")
    beside = run.absolute().parent / "text" / "tokenizer.json"
    tokenizer = tokenizer or (beside if beside.exists() else None)
    settings = ModelSettings(**source.config["model"])
    targets = []
    for step, place in source.checkpoints().items():
        targets.append(folder / f"checkpoint-{step}")
        export(load_checkpoint(place, settings), targets[-1], tokenizer)
    return targets


class Projections(NamedTuple):
    """Weights [d, d] and biases [d] of the four maps of an attention layer, as in nn.Linear."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]


def projections(layer: nn.Module) -> Projections:
    """Return the four maps of softmax or tied attention; those of the tied layer by its definition."""
    if isinstance(layer, TiedAttention):
        q, k = layer.q_proj, layer.k_proj
        steps = layer.log_step.exp().repeat_interleave(k.out_features // layer.heads)
        value = (steps.unsqueeze(-1) * k.weight, steps * k.bias)
        return Projections((q.weight, q.bias), (k.weight, k.bias), value, (q.weight.mT, torch.zeros_like(q.bias)))
    if not isinstance(layer, MultiheadAttention):
        problem = f"{type(layer).__name__} has no query, key, value and output maps of its heads"
        raise InputValueError("projections", "layer", problem, "Use softmax or tied attention.")
    query, key, value = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    return Projections(query, key, value, (layer.out_proj.weight, layer.out_proj.bias))


# Architectures --------------------------------------------------------------------------------------------------------


def _gpt2(model: Transformer) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    s = model.settings
    config = GPT2Config(
        vocab_size=s.vocabulary, n_positions=s.context, n_embd=s.width, n_layer=s.layers, n_head=s.heads,
        n_inner=s.hidden, activation_function=s.activation, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        layer_norm_epsilon=1e-5, bos_token_id=PAD, eos_token_id=PAD,
        tie_word_embeddings=not s.separate and s.embedding_scale == 1.0,
    )  # fmt: skip
    weights = {
        "transformer.wte.weight": s.embedding_scale * model.embedding.weight,
        "transformer.wpe.weight": s.embedding_scale * model.positions,
        "lm_head.weight": (model.unembedding or model.embedding).weight,
        **_norm("transformer.ln_f", model.last),
    }
    for i, (block, maps, first, second) in enumerate(_layers(model)):
        name = f"transformer.h.{i}"
        q, k, v, o = maps
        weights |= {  # GPT-2 stores transposed matrices
            f"{name}.attn.c_attn.weight": torch.cat((q[0], k[0], v[0])).mT,
            f"{name}.attn.c_attn.bias": torch.cat((q[1], k[1], v[1])),
            f"{name}.attn.c_proj.weight": o[0].mT,
            f"{name}.attn.c_proj.bias": o[1],
            f"{name}.mlp.c_fc.weight": first.weight.mT,
            f"{name}.mlp.c_fc.bias": first.bias,
            f"{name}.mlp.c_proj.weight": second.weight.mT,
            f"{name}.mlp.c_proj.bias": second.bias,
            **_norm(f"{name}.ln_1", block.before[0]),
            **_norm(f"{name}.ln_2", block.before[1]),
        }
    return _filled(GPT2LMHeadModel(config), weights)


def _bert(model: Transformer) -> Any:
    from transformers import BertConfig, BertModel

    s = model.settings
    config = BertConfig(
        **_encoder_options(s), type_vocab_size=1, max_position_embeddings=s.context, is_decoder=s.objective == "causal",
    )  # fmt: skip
    weights = {
        "embeddings.word_embeddings.weight": s.embedding_scale * model.embedding.weight,
        "embeddings.position_embeddings.weight": s.embedding_scale * model.positions,
        "embeddings.token_type_embeddings.weight": torch.zeros(1, s.width),
        **_norm("embeddings.LayerNorm", model.first),
    }
    for i, (block, maps, first, second) in enumerate(_layers(model)):
        name = f"encoder.layer.{i}"
        weights |= _encoder_layer(name, maps, first, second)
        weights |= _norm(f"{name}.attention.output.LayerNorm", block.after[0])
        weights |= _norm(f"{name}.output.LayerNorm", block.after[1])
    return _filled(BertModel(config, add_pooling_layer=False), weights)


def _esm(model: Transformer) -> Any:
    from transformers import EsmConfig, EsmModel

    s = model.settings
    config = EsmConfig(
        **_encoder_options(s), max_position_embeddings=s.context + PAD + 1, position_embedding_type="absolute",
        emb_layer_norm_before=False, token_dropout=False, mask_token_id=None,
    )  # fmt: skip
    weights = {
        "embeddings.word_embeddings.weight": s.embedding_scale * model.embedding.weight,
        # Positions are counted from the number after that of the padding token.
        "embeddings.position_embeddings.weight": torch.cat(
            (torch.zeros(PAD + 1, s.width), s.embedding_scale * model.positions)
        ),
        **_norm("encoder.emb_layer_norm_after", model.last),
        # A head for contacts of proteins, which nothing calls.
        "contact_head.regression.weight": torch.zeros(1, s.layers * s.heads),
        "contact_head.regression.bias": torch.zeros(1),
    }
    for i, (block, maps, first, second) in enumerate(_layers(model)):
        name = f"encoder.layer.{i}"
        weights |= _encoder_layer(name, maps, first, second)
        weights |= _norm(f"{name}.attention.LayerNorm", block.before[0])
        weights |= _norm(f"{name}.LayerNorm", block.before[1])
    return _filled(EsmModel(config, add_pooling_layer=False), weights)


def _encoder_options(s: ModelSettings) -> dict[str, Any]:
    return {
        "vocab_size": s.vocabulary, "hidden_size": s.width, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "intermediate_size": s.hidden, "hidden_act": s.activation,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-5, "pad_token_id": PAD,
    }  # fmt: skip


def _encoder_layer(name: str, maps: Projections, first: nn.Linear, second: nn.Linear) -> dict[str, Tensor]:
    """Weights of a layer of BERT and ESM, without its norms."""
    places = {
        "attention.self.query": maps.query,
        "attention.self.key": maps.key,
        "attention.self.value": maps.value,
        "attention.output.dense": maps.output,
        "intermediate.dense": (first.weight, first.bias),
        "output.dense": (second.weight, second.bias),
    }
    pairs = {f"{name}.{place}.weight": weight for place, (weight, _) in places.items()}
    return pairs | {f"{name}.{place}.bias": bias for place, (_, bias) in places.items()}


def _layers(model: Transformer) -> list[tuple[Block, Projections, nn.Linear, nn.Linear]]:
    """Each layer in order, a shared block as often as it is applied."""
    rows = []
    for i in range(model.settings.layers):
        block: Any = model.blocks[0 if model.settings.shared else i]
        rows.append((block, projections(block.attention.layer), block.feed_forward[0], block.feed_forward[2]))
    return rows


def _norm(name: str, norm: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}


def _filled(exported: nn.Module, weights: dict[str, Tensor]) -> Any:
    """The model of transformers with these weights; every one of its weights must be among them."""
    exported.load_state_dict({name: t.detach().clone().contiguous() for name, t in weights.items()})
    return exported.eval()


def main() -> None:
    """Export the checkpoints of a run."""
    parser = argparse.ArgumentParser(prog="python -m experiments.exporting")
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/experiments/ascent/causal-pre-free-0")
    parser.add_argument("folder", type=Path, help="where checkpoint-STEP are written")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: text/tokenizer.json beside the run")
    arguments = parser.parse_args()
    try:
        targets = export_run(arguments.run, arguments.folder, arguments.tokenizer)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{len(targets)} checkpoints; gradlogz probe {arguments.folder} --text TEXT")


if __name__ == "__main__":
    main()
