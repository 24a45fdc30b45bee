"""Findings that were never measured: of every shape that a report must show."""

import math

from gradlogz.probing.runs.findings import Findings
from gradlogz.probing.runs.records import Claim, Declaration, Finding, Quantity, Token

LAYERS, HEADS = 3, 4
VERDICTS = ("supported", "refuted", "inconclusive")
# Of some predictions only, and of one that is not measured: a page must also show a run without them.
DECLARATIONS = {
    "identity": Declaration(
        "identity of attention", "Attention is a gradient.", "y = ∇G", "An error.", ("By rounding.",), "", {}
    ),
    "entropy": Declaration(
        "entropy",
        "A head is sharper than chance.",
        "H / log n",
        "An entropy above that of random weights.",
        ("The entropy of each row [zhai23].", "Its null: random weights [efron79]."),
        "A head supports the claim below its null.",
        {"entropy": Quantity("share of log n", "H / log n"), "max logit": Quantity("nats", "max s")},
        ("zhai23", "shim22"),
    ),
    "ascent": Declaration(
        "ascent",
        "A layer climbs the log normaliser.",
        "ΔG(D) / ΔG(|D| ∇G/|∇G|)",
        "A gain of zero.",
        ("The gain of each layer.",),
        "A layer supports the claim above its null.",
        {"gain": Quantity("1", "ΔG(D) / ΔG(|D| ∇G/|∇G|)")},
    ),
}


def attention(layer):
    return f"encoder.layer.{layer}.attention.self"


def findings(model="planted", *, layers=LAYERS, heads=HEADS, more=0, shift=0.0, step=None, words=""):
    """Claims about heads (entropy, with `more` other quantities), about layers (ascent), about the whole model, and of
    a prediction that nobody knows; `words` wherever a model or a text has its say."""
    rows = []
    for i in range(layers):
        for h in range(heads):
            value = math.sin(1 + i + 2 * h) / 2 + 0.5 + shift
            verdict = VERDICTS[(i + h) % 3]
            row = Finding(
                model,
                "entropy",
                attention(i),
                1,
                h,
                "entropy",
                value,
                value - 0.1,
                value + 0.1,
                0.9,
                0.85,
                0.95,
                99,
                verdict,
            )
            rows.append(row)
            rows.append(
                row._replace(
                    quantity="max logit",
                    value=30 * value,
                    null=math.nan,
                    null_low=math.nan,
                    null_high=math.nan,
                    verdict="",
                )
            )
            rows += [row._replace(quantity=f"quantity {k}", value=value / (k + 2), verdict="") for k in range(more)]
            rows.append(row._replace(prediction="novel", quantity=f"size{words}", value=-value, verdict="refuted"))
        gain = 0.1 * i + shift
        rows.append(
            Finding(
                model,
                "ascent",
                attention(i),
                1,
                None,
                "gain",
                gain,
                gain - 0.02,
                gain + 0.02,
                0.05,
                0.0,
                0.1,
                50,
                "supported",
            )
        )
        rows.append(
            Finding(
                model, "linearity", f"encoder.layer.{i}", 1, None, "held-out R²", math.nan, verdict="not applicable"
            )
        )
    rows.append(Finding(model, "whole", "", 1, None, "loss", 2.5 + shift, 2.4, 2.6, verdict="inconclusive"))
    claims = [
        Claim(model, "entropy", "Heads choose.", "entropy", 0.5 + shift, 0.4, 0.6, 0.9, "supported", "They do."),
        Claim(
            model, "ascent", "Layers climb.", "gain", 0.1 + shift, 0.05, 0.2, 0.05, "refuted", "They do not. A note."
        ),
        Claim(
            model,
            "linearity",
            "Layers are affine.",
            "held-out R²",
            *[math.nan] * 4,
            "not applicable",
            "There are none.",
        ),
        Claim(
            model,
            "novel",
            f"News{words}.",
            f"size{words}",
            -0.5,
            math.nan,
            math.nan,
            math.nan,
            "inconclusive",
            f"Who knows{words}.",
        ),
    ]
    tokens = [
        Token(model, "largest logit", attention(1), 1, 2, 80.0, f"document{words}", 7, f"about a [token{words}] of it"),
        Token(model, "largest variance", attention(0), 1, 0, 3.0, "other", 1, "the [first] one"),
    ]
    facts = {"architecture": f"Planted{words}", "parameters": 12345678, "layers": layers, "heads": heads, "tokens": 99}
    return Findings({model: facts if step is None else {**facts, "step": step}}, rows, claims, tokens, DECLARATIONS)
