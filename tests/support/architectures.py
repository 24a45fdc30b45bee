"""Small random models of many Hugging Face architectures, with logits large enough to detect a wrong mask."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf

VOCABULARY, TOKENS, PADDED = 64, 12, 4
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT = {**TEXT, **SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40}
LLAMA = {**TEXT, **SIZES, "num_key_value_heads": 2, "attention_dropout": 0.0, "max_position_embeddings": 40}
OF_HEADS_OF_8 = {**LLAMA, "head_dim": 8}


@dataclass
class Architecture:
    """A name, its configuration, the model's class, and the kind of its inputs."""

    name: str
    config: type
    options: dict[str, Any]
    model: type
    kind: str = "decoder"  # or encoder, pair (encoder and decoder), image, sound, both (image and text)
    fallback: bool = False  # attention outside transformers' interface
    implementations: tuple[str, ...] = ("eager", "sdpa")
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return self.name

    def build(self, implementation="eager", **options):
        torch.manual_seed(0)
        config = self.config(**{**self.options, **options})
        with torch.random.fork_rng():
            model = self.model._from_config(config, attn_implementation=implementation)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim >= 2:
                    p.normal_(0.0, 1.3 / math.sqrt(p[0].numel()))
                elif "sinks" in name:
                    p.normal_()
        return model.eval()

    def inputs(self, padding=None):
        """Return a batch of two sequences; the second is padded on one side."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
        mask = torch.ones_like(ids)
        if padding is not None:
            side = slice(TOKENS - PADDED, None) if padding == "right" else slice(None, PADDED)
            mask[1, side] = 0
            ids = torch.where(mask.bool(), ids, 0)
        image = torch.randn(2, 3, 16, 16, generator=generator)
        if self.kind == "image":
            return {"pixel_values": image}
        if self.kind == "both":
            return {"input_ids": ids, "pixel_values": image, "attention_mask": mask}
        if self.kind == "sound":
            return {"input_values": torch.randn(2, 400, generator=generator)}
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.name == "whisper":
            inputs = {"input_features": torch.randn(2, 8, 24, generator=generator)}
        if self.kind == "pair":
            inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
        return inputs


def _bert(name, config, model, **options):
    return Architecture(name, config, {**BERT, **options}, model, "encoder")


def _llama(name, config, model, base=LLAMA, implementations=("eager", "sdpa"), **options):
    return Architecture(name, config, {**base, **options}, model, implementations=implementations)


VISION = {**SIZES, "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MIXED = {**TEXT, **SIZES, "max_position_embeddings": 40, "attention_dropout": 0.0}
PAIR = {
    **TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 40, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip

ARCHITECTURES = [
    _bert("bert", tf.BertConfig, tf.BertForMaskedLM),
    _bert("roberta", tf.RobertaConfig, tf.RobertaForMaskedLM),
    _bert("albert", tf.AlbertConfig, tf.AlbertForMaskedLM, embedding_size=16, num_hidden_layers=3),
    Architecture(
        "distilbert", tf.DistilBertConfig,
        {**TEXT, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0,
         "max_position_embeddings": 40}, tf.DistilBertForMaskedLM, "encoder",
    ),
    _bert("electra", tf.ElectraConfig, tf.ElectraForMaskedLM, embedding_size=16),
    Architecture(
        "modernbert", tf.ModernBertConfig,
        {**TEXT, **SIZES, "num_hidden_layers": 3, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2,
         "max_position_embeddings": 40}, tf.ModernBertForMaskedLM, "encoder",
    ),
    Architecture(
        "gpt2", tf.GPT2Config,
        {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "scale_attn_by_inverse_layer_idx": True}, tf.GPT2LMHeadModel,
    ),
    Architecture("gpt_neox", tf.GPTNeoXConfig, {**TEXT, **SIZES, "max_position_embeddings": 40}, tf.GPTNeoXForCausalLM),
    Architecture(
        "opt", tf.OPTConfig,
        {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
         "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 40},
        tf.OPTForCausalLM,
    ),
    _llama("llama", tf.LlamaConfig, tf.LlamaForCausalLM),
    _llama("mistral", tf.MistralConfig, tf.MistralForCausalLM, sliding_window=5),
    _llama("qwen2", tf.Qwen2Config, tf.Qwen2ForCausalLM),
    _llama("qwen3", tf.Qwen3Config, tf.Qwen3ForCausalLM, OF_HEADS_OF_8),
    _llama("gemma2", tf.Gemma2Config, tf.Gemma2ForCausalLM, OF_HEADS_OF_8, ("eager",), sliding_window=5,
           attn_logit_softcapping=3.0, query_pre_attn_scalar=7),
    _llama("gemma3", tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, OF_HEADS_OF_8, sliding_window=5,
           query_pre_attn_scalar=7),
    _llama("gpt_oss", tf.GptOssConfig, tf.GptOssForCausalLM, OF_HEADS_OF_8, ("eager",), sliding_window=5,
           num_local_experts=4, num_experts_per_tok=2),
    _llama("phi3", tf.Phi3Config, tf.Phi3ForCausalLM, resid_pdrop=0.0, embd_pdrop=0.0),
    _llama("granite", tf.GraniteConfig, tf.GraniteForCausalLM, attention_multiplier=0.7),
    _llama("cohere", tf.CohereConfig, tf.CohereForCausalLM),
    _llama(
        "deepseek_v3", tf.DeepseekV3Config, tf.DeepseekV3ForCausalLM, {**LLAMA, "num_key_value_heads": 4},
        q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    _llama("mixtral", tf.MixtralConfig, tf.MixtralForCausalLM, num_local_experts=4, sliding_window=5),
    _llama("olmo2", tf.Olmo2Config, tf.Olmo2ForCausalLM),
    Architecture(
        "t5", tf.T5Config,
        {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
         "decoder_start_token_id": 0}, tf.T5ForConditionalGeneration, "pair",
    ),
    Architecture("bart", tf.BartConfig, PAIR, tf.BartForConditionalGeneration, "pair"),
    Architecture(
        "whisper", tf.WhisperConfig,
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20,
         "suppress_tokens": None, "begin_suppress_tokens": None}, tf.WhisperForConditionalGeneration, "pair",
    ),
    Architecture("vit", tf.ViTConfig, VISION, tf.ViTModel, "image"),
    Architecture("dinov2", tf.Dinov2Config, VISION, tf.Dinov2Model, "image"),
    Architecture(
        "clip", tf.CLIPConfig, {"text_config": MIXED, "vision_config": {**MIXED, "image_size": 16, "patch_size": 4},
        "projection_dim": 16}, tf.CLIPModel, "both",
    ),
    Architecture(
        "siglip", tf.SiglipConfig, {"text_config": {**MIXED, "max_position_embeddings": TOKENS},
        "vision_config": {**MIXED, "image_size": 16, "patch_size": 4}}, tf.SiglipModel, "both",
    ),
    Architecture(
        "wav2vec2", tf.Wav2Vec2Config,
        {**TEXT, **SIZES, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
         "layerdrop": 0.0, "mask_time_prob": 0.0}, tf.Wav2Vec2Model, "sound",
    ),
    Architecture(
        "bloom", tf.BloomConfig,
        {**TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        tf.BloomForCausalLM, fallback=True, implementations=("eager",),
    ),
    Architecture(
        "falcon", tf.FalconConfig,
        {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout": 0.0,
         "attention_dropout": 0.0, "max_position_embeddings": 40}, tf.FalconForCausalLM, fallback=True,
    ),
    Architecture(
        "gptj", tf.GPTJConfig,
        {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 40, "attn_pdrop": 0.0,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0}, tf.GPTJForCausalLM, fallback=True, implementations=("eager",),
    ),
    Architecture(
        "deberta-v2", tf.DebertaV2Config,
        {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
         "norm_rel_ebd": "layer_norm", "share_att_key": True}, tf.DebertaV2ForMaskedLM, "encoder", fallback=True,
        implementations=("eager",),
    ),
]  # fmt: skip


def outputs_of(model, inputs):
    """Return the tensors of a model's output that are compared in tests."""
    output = model(**inputs)
    names = ("logits", "last_hidden_state", "image_embeds", "text_embeds", "logits_per_image")
    return {name: output[name] for name in names if name in output and output[name] is not None}


def kept(architecture, inputs, name, tensor):
    """Return the rows of an output that are not padding."""
    if architecture.kind in ("encoder", "decoder") and name in ("logits", "last_hidden_state"):
        return tensor[inputs["attention_mask"].bool()]
    return tensor
