"""A small random model of every architecture that transformers ships, as far as its sizes can be made small.

Sizes are set by the names of the configuration's fields, since most architectures share them; SPECIAL has the rest.
"""

import dataclasses
import math
import re

import torch
import transformers as tf
from transformers.models.auto import modeling_auto

VOCABULARY, TOKENS, PIXELS, SAMPLES = 64, 12, 32, 800
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image and text": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "sound": "MODEL_FOR_CTC_MAPPING_NAMES",
}
LARGEST = 30_000_000  # parameters: larger models have a size that is not set

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 48
SIZES = [
    (WIDTH, (
        "hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size", "hidden_dim", "n_embed",
        "decoder_hidden_size", "word_embed_proj_dim", "encoder_hidden_size", "dim_model", "model_dim", "width",
    )),
    (HEADS, (
        "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads", "attention_heads", "lightning_num_heads",
    )),
    (2, (
        "num_key_value_heads", "num_kv_heads", "num_local_experts", "n_group", "linear_num_key_heads",
        "linear_num_value_heads", "num_experts_per_tok", "moe_topk", "expert_layer_period", "attn_layer_period",
    )),
    (1, ("topk_group", "num_shared_experts", "n_shared_experts", "first_k_dense_replace")),
    (4, (
        "num_experts", "n_routed_experts", "moe_num_experts", "patch_size", "qk_rope_head_dim", "block_size",
        "rotary_dim", "num_conv_pos_embeddings",
    )),
    (LAYERS, (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_feat_extract_layers", "num_hidden_groups",
        "num_conv_pos_embedding_groups",
    )),
    (INNER, (
        "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff",
        "moe_intermediate_size", "shared_expert_intermediate_size",
        "mlp_dim", "dim_feedforward", "ffn_hidden_size", "d_inner", "dim_ff",
        "moe_shared_expert_intermediate_size", "intermediate_size_mlp", "encoder_intermediate_size",
    )),
    (8, (
        "head_dim", "attention_head_size", "d_kv", "d_head", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank",
        "dim_head",
        "linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "kv_channels", "num_mel_bins", "qk_head_dim",
        "global_head_dim", "window_size",
    )),
    (16, ("q_lora_rank", "projection_dim", "num_buckets", "embedding_dim")),
    (5, ("sliding_window", "index_topk")),
    (40, (
        "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_source_positions",
        "max_target_positions",
    )),
    (VOCABULARY, ("vocab_size", "encoder_vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size")),
    (PIXELS, ("image_size",)),
]  # fmt: skip
NAMED = {name: size for size, names in SIZES for name in names}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "cls_token_id": 1,
             "sep_token_id": 2, "mask_token_id": 3, "unk_token_id": 3, "forced_eos_token_id": None,
             "forced_bos_token_id": None}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
DELTA = {**LATENT, **HYBRID, "n_group": 1, "linear_head_dim": 8, "linear_num_heads": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
PER_LAYER = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
DECODER = {"is_decoder": True}
SPECIAL = {
    "axk1": LATENT, "axk2": LATENT, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "deepseek_v32": LATENT,
    "glm4_moe_lite": LATENT, "glm_moe_dsa": LATENT, "minicpm3": LATENT, "youtu": LATENT,
    "bailing_hybrid": DELTA, "kimi_linear": DELTA,
    "qwen3_5_moe_text": HYBRID, "qwen3_5_text": HYBRID, "qwen3_next": HYBRID,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {**DECODER, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], **PER_LAYER},
    "gemma4_text": PER_LAYER,
    "ernie4_5_moe": {"moe_k": 2},
    "longcat_flash": {**LATENT, "qk_head_dim": None, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "roc_bert": {
        "pronunciation_vocab_size": 8, "shape_vocab_size": 8, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    },
    "xmod": {"languages": ["en"], "default_language": "en"},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "esmc": {"num_key_value_heads": 4},
    "moshi": {"audio_vocab_size": 8},
}  # fmt: skip
# Encoders that transformers also lists as causal language models.
ENCODERS = {
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
DROPOUT = re.compile("drop|mask_time_prob|mask_feature_prob")


class NotBuiltError(Exception):
    """No small model of this architecture could be built, or it does not run on these inputs."""


def architectures(kind):
    """Return the model types of a kind."""
    return sorted(getattr(modeling_auto, KINDS[kind]))


def tiny(kind, model_type):
    """Return a small random model with eager attention, its inputs, and its output for them."""
    names = getattr(modeling_auto, KINDS[kind])[model_type]
    try:
        model_class = getattr(tf, names if isinstance(names, str) else names[0])
        config = tiny_config(tf.CONFIG_MAPPING[model_type])
        if kind == "causal" and model_type in ENCODERS:
            config.is_decoder = True
        with torch.device("meta"):
            parameters = sum(p.numel() for p in model_class(config).parameters())
        if parameters > LARGEST:
            raise NotBuiltError(f"{parameters} parameters")
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation="eager").eval()
        sharpen(model)
        batch = inputs(kind, model)
        return model, batch, output_of(model, batch)
    except Exception as error:
        raise NotBuiltError(f"{model_type}: {type(error).__name__}: {error}") from error


def tiny_config(config_class):
    """Return a configuration with small sizes and without dropout."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    single = {name for name, default in defaults.items() if not isinstance(default, list | tuple)}  # not one per stage
    options = {name: size for name, size in {**NAMED, **TOKEN_IDS}.items() if name in single}
    for name, part in (config_class.sub_configs or {}).items():
        if name in defaults and part is not tf.AutoConfig:
            options[name] = tiny_config(part).to_dict()
    options |= {name: 0.0 for name, default in defaults.items() if type(default) is float and DROPOUT.search(name)}
    return config_class(**{**options, **SPECIAL.get(config_class.model_type, {})})


@torch.no_grad()
def sharpen(model):
    """Draw the weights such that attention is far from uniform."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if p.ndim >= 2 and p.numel():
            p.normal_(0.0, 1.3 / math.sqrt(p[0].numel()), generator=generator)
        elif "sinks" in name:
            p.normal_(generator=generator)


def inputs(kind, model):
    """Return a batch of two."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, VOCABULARY, (2, TOKENS), generator=generator)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    image = {"pixel_values": torch.randn(2, 3, PIXELS, PIXELS, generator=generator)}
    if model.config.model_type == "siglip2":  # patches, and how many there are in each direction
        image = {
            "pixel_values": torch.randn(2, 64, 48, generator=generator),
            "pixel_attention_mask": torch.ones(2, 64, dtype=torch.long),
            "spatial_shapes": torch.full((2, 2), 8),
        }
    if kind == "seq2seq":
        return {**text, "decoder_input_ids": ids.flip(-1)[:, :7]}
    if kind == "sound" and model.main_input_name == "input_features":
        features = getattr(model.config, "feature_projection_input_dim", 8)
        return {"input_features": torch.randn(2, 40, features, generator=generator)}
    if kind == "sound":
        return {"input_values": torch.randn(2, SAMPLES, generator=generator)}
    return {"image": image, "image and text": {**text, **image}}.get(kind, text)


@torch.no_grad()
def output_of(model, batch):
    """Return the main output of a model."""
    result = model(**batch)
    names = ("logits", "prediction_logits", "logits_per_image", "last_hidden_state")
    return next(result[name] for name in names if name in result and result[name] is not None)


def distance(actual, expected):
    """Return the largest difference, divided by the scale of the output."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1.0))
