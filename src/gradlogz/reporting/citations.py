"""The works that predictions cite, by their keys in references.bib."""

import re
from collections.abc import Iterable

from ..page import Reference

REFERENCES = {
    r.key: r
    for r in (
        Reference("shim22", "Shim, A Probabilistic Interpretation of Transformers, 2022.", "arXiv 2205.01080"),
        Reference("ramsauer20", "Ramsauer et al., Hopfield Networks is All You Need, 2020.", "arXiv 2008.02217"),
        Reference(
            "geshkovski23",
            "Geshkovski, Letrouit, Polyanskiy, Rigollet, A mathematical perspective on Transformers, 2023.",
            "arXiv 2312.10794",
        ),
        Reference("dong21", "Dong, Cordonnier, Loukas, Attention is Not All You Need, 2021.", "arXiv 2103.03404"),
        Reference(
            "zhai23",
            "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, 2023.",
            "arXiv 2303.06296",
        ),
        Reference("efron79", "Efron, Bootstrap Methods: Another Look at the Jackknife, Annals of Statistics 7, 1979."),
        Reference(
            "hanley06",
            "Hanley, MacGibbon, Creating Non-Parametric Bootstrap Samples Using Poisson Frequencies, Computer Methods "
            "and Programs in Biomedicine 83, 2006.",
        ),
        Reference(
            "busing99",
            "Busing, Meijer, van der Leeden, Delete-m Jackknife for Unequal m, Statistics and Computing 9, 1999.",
        ),
        Reference(
            "benjamini95",
            "Benjamini, Hochberg, Controlling the False Discovery Rate, Journal of the Royal Statistical Society B 57, "
            "1995.",
        ),
        Reference(
            "xiao24",
            "Xiao, Tian, Chen, Han, Lewis, Efficient Streaming Language Models with Attention Sinks, 2024.",
            "arXiv 2309.17453",
        ),
        Reference("gu25", "Gu et al., When Attention Sink Emerges in Language Models, 2025.", "arXiv 2410.10781"),
        Reference("razzhigaev24", "Razzhigaev et al., Your Transformer is Secretly Linear, 2024.", "arXiv 2405.12250"),
        Reference(
            "saponati25",
            "Saponati et al., The Underlying Structures of Self-Attention, 2025.",
            "arXiv 2502.10927",
        ),
        Reference(
            "sun24", "Sun, Chen, Kolter, Liu, Massive Activations in Large Language Models, 2024.", "arXiv 2402.17762"
        ),
        Reference(
            "anderson54",
            "Anderson, Darling, A Test of Goodness of Fit, Journal of the American Statistical Association 49, 1954.",
        ),
        Reference(
            "mardia74",
            "Mardia, Applications of Some Measures of Multivariate Skewness and Kurtosis, Sankhya B 36, 1974.",
        ),
    )
}


def cited(texts: Iterable[str]) -> tuple[Reference, ...]:
    """The works whose keys stand in brackets in these texts."""
    keys = {key for text in texts for key in re.findall(r"\[([a-z]+[0-9]{2})(?:,[^]]*)?\]", text)}
    return tuple(reference for key, reference in REFERENCES.items() if key in keys)
