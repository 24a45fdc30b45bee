"""Attention that reports its own statistics.

attend      scaled dot-product attention with the log normaliser, entropy and logit moments of every row
attend_varlen   the same over packed documents, with the signature of flash-attn
ring_attend     the same over a sequence that is split over processes; ring_positions: the tokens of each
Attention   the result; `merge` joins results over blocks of keys
observe     the statistics of every attention layer inside a model, while it runs
monitor     statistics and alerts for every head during training; the model's own attention computes the output
register    attn_implementation="gradlogz" for Hugging Face models
qk_clip     bounded logits, by scaling query and key projections after an optimizer step
z_loss      penalties on statistics; also entropy_loss and logit_variance_loss
layers      attention modules: torch's multi-head attention, attention to other measures, and without a softmax
linear_attend   weights that are products of features; sigmoid_attend: a sigmoid for each key
"""

from .functional import attend as attend
from .linear import linear_attend as linear_attend, LinearAttended as LinearAttended, LinearState as LinearState
from .sigmoid import sigmoid_attend as sigmoid_attend, SigmoidAttended as SigmoidAttended
from .packed import attend_varlen as attend_varlen
from .ring import ring_attend as ring_attend, ring_positions as ring_positions
from .result import Attention as Attention
from .losses import z_loss as z_loss, entropy_loss as entropy_loss, logit_variance_loss as logit_variance_loss
from .in_models.observation import observe as observe, Observation as Observation
from .in_models.monitoring import monitor as monitor, Monitor as Monitor
from .in_models.monitor_rows import MonitorRow as MonitorRow, Alert as Alert
from .in_models.alerts import Thresholds as Thresholds
from .in_models.logit_clipping import qk_clip as qk_clip
from .in_models.huggingface import register as register, unregister as unregister, collect as collect
from .layers.multihead import MultiheadAttention as MultiheadAttention
from .layers.moment import MomentAttention as MomentAttention
from .layers.mixture import MixtureAttention as MixtureAttention
from .layers.gated import GatedHeads as GatedHeads
from .layers.link import LinkAttention as LinkAttention
from .layers.linear import LinearAttention as LinearAttention
from .layers.sigmoid import SigmoidAttention as SigmoidAttention
from .layers.cosine import CosineAttention as CosineAttention
