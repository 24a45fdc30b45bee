"""Small models saved in folders, with a tokenizer of numbers, as trainers save them."""

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 60
TEXTS = [" ".join(str((7 * i + 3 * j * j) % WORDS) for j in range(24)) for i in range(10)]
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def tokenizer():
    """A tokenizer with one token for each number below WORDS."""
    numbers = {"[PAD]": 0, "[UNK]": 1, **{str(i): i + 2 for i in range(WORDS)}}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", model_max_length=32)


def gpt2(seed=0):
    """A GPT-2 of two layers whose weights are larger than initial ones."""
    torch.manual_seed(seed)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0 if p.ndim == 2 else 1.0)
    return model


def llama(seed=0):
    """A Llama of two layers."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tf.LlamaConfig(**sizes, intermediate_size=48, max_position_embeddings=32, **SIZES)
    return tf.LlamaForCausalLM(config).eval()


def save(model, folder, *, words=True, **options):
    """Save a model in a folder, with its tokenizer unless a trainer saves that elsewhere."""
    model.save_pretrained(folder, **options)
    if words:
        tokenizer().save_pretrained(folder)
    return folder


def save_text(path):
    """Save documents, one per line."""
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    return path
