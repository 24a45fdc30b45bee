"""Attention that reports its own statistics.

attend      scaled dot-product attention with the log normaliser, entropy and logit moments of every row
Attention   what it returns; `merge` joins results over blocks of keys
observe     the same of every attention layer inside a model, while it runs
monitor     the same during training, beside the model's own attention; rows, alerts
register    attn_implementation="gradlogz" for Hugging Face models
layers      attention with parameters: torch's, and what other measures make of it
"""

from .functional import attend
from .in_models.head_summaries import Alert, Row, Thresholds
from .in_models.huggingface import register, unregister
from .in_models.monitoring import Monitor, monitor
from .in_models.observation import Observation, observe
from .layers import GatedHeads, LinkAttention, MixtureAttention, MomentAttention, MultiheadAttention
from .result import Attention

__all__ = [
    "attend",
    "Attention",
    "observe",
    "Observation",
    "monitor",
    "Monitor",
    "Row",
    "Alert",
    "Thresholds",
    "register",
    "unregister",
    "MultiheadAttention",
    "MomentAttention",
    "MixtureAttention",
    "GatedHeads",
    "LinkAttention",
]
