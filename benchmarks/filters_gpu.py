"""A million targets on a GPU: target-steps per second of IMM with 3 modes, state 4, observation 2.

python3 benchmarks/filters_gpu.py [folder]     on a machine with a GPU; writes filters_gpu.json

"series" keeps the last step alone, "all fields" keeps every field of every step, "gradients" is the log likelihood of
the series with its gradient in the model and the observations, and "step, compiled" is `SwitchingFilter.step` under
torch.compile, one call for each observation. "bytes" is the memory at its highest for each target.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from gradlogz import SwitchingFilter, SwitchingModel, constant_velocity, coordinated_turn

TARGETS, STEPS, ROUNDS = 1 << 20, 3, 5
FIELDS = ("transition", "F", "Q", "H", "R")


def assembled(dtype: torch.dtype) -> SwitchingModel:
    """One mode that flies straight, and two turns."""
    noise = {"dt": 1.0, "spectral_density": 0.05, "observation_variance": 0.5, "dtype": dtype}
    modes = [constant_velocity(2, **noise), *(coordinated_turn(2, rate=r, **noise) for r in (0.2, -0.2))]
    transition = torch.full((3, 3), 0.05, dtype=dtype).fill_diagonal_(0.9)
    model = SwitchingModel.of(modes, transition=transition)
    return SwitchingModel(**{name: getattr(model, name).cuda() for name in FIELDS}, validate=False)


def measured(call: Callable[[], object], steps: int) -> dict[str, float]:
    """Target-steps per second, the median of rounds, and bytes for each target."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = TARGETS * steps / statistics.median(seconds)
    return {"rate": round(rate), "bytes": round(torch.cuda.max_memory_allocated() / TARGETS)}


def rows() -> list[dict[str, object]]:
    found = []
    for dtype in (torch.float64, torch.float32):
        model = assembled(dtype)
        chosen = SwitchingFilter(model)
        y = torch.randn(TARGETS, STEPS, 2, dtype=dtype, device="cuda").cumsum(1)
        start = {name: t.to(y) for name, t in (("mean", torch.zeros(4)), ("covariance", torch.eye(4)))}

        def gradients(y: torch.Tensor = y, model: SwitchingModel = model, start: dict = start) -> object:
            leaves = [t.detach().requires_grad_() for t in (y, *(getattr(model, name) for name in FIELDS))]
            learned = SwitchingFilter(SwitchingModel(*leaves[1:], validate=False))
            total = learned.filter(leaves[0], **start, keep="last").log_likelihood.sum()
            return torch.autograd.grad(total, leaves)

        step = torch.compile(lambda state, observation, c=chosen: c.step(state, observation))
        state = chosen.init(**start, batch_shape=(TARGETS,))
        calls = {
            "series": lambda c=chosen, y=y, s=start: c.filter(y, **s, keep="last"),
            "all fields": lambda c=chosen, y=y, s=start: c.filter(y, **s),
            "gradients": gradients,
            "step, compiled": lambda f=step, s=state, z=y[:, 0]: f(s, z),
        }
        for name, call in calls.items():
            try:
                row = measured(call, 1 if name.startswith("step") else STEPS)
            except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
                row = {"failed": str(error).splitlines()[0][:200]}
            found.append({"dtype": str(dtype).removeprefix("torch."), "asked": name, **row})
            print(found[-1], flush=True)
            torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    table = {
        "benchmark": "filters_gpu",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "targets": TARGETS,
        "rows": rows(),
    }
    (folder / "filters_gpu.json").write_text(json.dumps(table, indent=2) + "\n")
