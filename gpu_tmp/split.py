import os, sys, json, statistics
sys.path[:0] = ["src", "benchmarks"]
import torch
import attention_gpu as ag
from gradlogz import attend
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
warm = len(sys.argv) > 1
k = os.environ.get("GRADLOGZ_SPLIT", "0")
torch.manual_seed(0)
if warm:
    for d in (64, 128):
        x = [torch.randn(1, 2, 512, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for c in (False, True):
            attend(*x, is_causal=c)
            if k == "0": attend(*x, is_causal=c, statistics="none")
    torch.cuda.synchronize(); sys.exit()
# exactness against float64
worst = {}
for d in (64, 128):
    q, kk, v = (torch.randn(1, 4, 1024, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for c in (False, True):
        a = attend(q*2, kk*2, v, is_causal=c)
        b = attend((q*2).double(), (kk*2).double(), v.double(), is_causal=c)
        for n in ("log_normalizer", "entropy", "mean_logit", "logit_variance", "max_logit"):
            e = (getattr(a, n).double() - getattr(b, n)).abs().max().item() / max(1, getattr(b, n).abs().max().item())
            worst[n] = max(worst.get(n, 0), e)
print("split", k, "errors", {n: f"{e:.1e}" for n, e in worst.items()}, flush=True)
for shape in ag.SHAPES:
    for causal in (False, True):
        x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(*x, is_causal=causal)
        calls = {"stat": lambda: attend(*x, is_causal=causal), "cudnn": cudnn}
        if k == "0": calls["none"] = lambda: attend(*x, is_causal=causal, statistics="none")
        t = ag.as_graphs(calls, repeats=10 if shape[2] <= 1024 else 3)
        print("split", k, shape, causal, {n: round(t[n] / t["cudnn"], 3) for n in t}, t["cudnn"], flush=True)
