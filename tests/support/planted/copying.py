"""A GPT-2 whose loss depends on one head alone, made with numpy: it copies the token before the present one.

The stream is [token, position, rest], one-hot in each of the first two parts, so that LayerNorm acts on every token by
the same affine map. The head attends from position i to position i - 1 and writes the token it reads with a large
factor; all other heads and all feed-forward sublayers write nothing. In texts "a b a b a b" the copied token is the
next one, and without the head the model predicts the present token.
"""

import torch
import transformers as tf

TOKENS = POSITIONS = 16
HEADS, WIDTH = 4, 64
SIZE = WIDTH // HEADS
LAYER, HEAD = 1, 2


def copying(sharpness=40.0, strength=6.0):
    """Return the model; attention is the sharper, and the copied token the louder, the larger the arguments are."""
    config = tf.GPT2Config(
        vocab_size=TOKENS, n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=HEADS, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.zero_()
        model.transformer.wte.weight[:, :TOKENS] = torch.eye(TOKENS)
        model.transformer.wpe.weight[:, TOKENS : 2 * TOKENS] = torch.eye(POSITIONS)
        attention = model.transformer.h[LAYER].attn
        query, key, value = (torch.zeros(WIDTH, SIZE) for _ in range(3))
        query[TOKENS + 1 : 2 * TOKENS, : SIZE - 1] = sharpness**0.5 * torch.eye(POSITIONS - 1)
        key[TOKENS : 2 * TOKENS] = sharpness**0.5 * torch.eye(POSITIONS)
        value[:TOKENS] = torch.eye(TOKENS)
        for part, matrix in enumerate((query, key, value)):
            first = part * WIDTH + HEAD * SIZE
            attention.c_attn.weight[:, first : first + SIZE] = matrix
        attention.c_proj.weight[HEAD * SIZE : (HEAD + 1) * SIZE, :TOKENS] = strength * torch.eye(TOKENS)
    return model


def alternating(documents, seed=0):
    """Return texts "a b a b ..." of two random tokens each, as pairs (name, text)."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [torch.randperm(TOKENS - 4, generator=generator)[:2].tolist() for _ in range(documents)]
    return [(f"document {i}", " ".join(str(pair[j % 2]) for j in range(POSITIONS))) for i, pair in enumerate(pairs)]
