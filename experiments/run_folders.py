"""The files of a run.

    config.json            settings of the model, the training and the task; the seed
    environment.json       versions, device, threads
    curves.jsonl           a row for each recorded step: step, loss, learning rate, evaluation
    checkpoints/step-N/    model.safetensors and settings.json at steps 0, 1, 2, 4, 8, ... and the last
    resume.safetensors     weights, moments of the optimizer and the step; deleted when the run is complete
    complete.json          the last row and the seconds of the run

Every file is replaced in one step, so that a run that is killed leaves the old one or the new one.

Read next: training.py.
"""

import json
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gradlogz import __version__
from gradlogz._output_files import replaced


class RunFolder:
    """Files of a run below a path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir(parents=True, exist_ok=True)

    def begin(self, config: dict[str, Any], device: torch.device) -> None:
        """Write the configuration and the environment; keep those of a run that is resumed."""
        if self.config is None:
            self._write_json("environment.json", environment(device))
            self._write_json("config.json", config)

    @property
    def config(self) -> dict[str, Any] | None:
        """The configuration, None for a new folder."""
        return self._read_json("config.json")

    @property
    def complete(self) -> dict[str, Any] | None:
        """Summary of a finished run, else None."""
        return self._read_json("complete.json")

    @property
    def curves(self) -> list[dict[str, float]]:
        """Recorded rows; a half-written last line is left out."""
        path = self.path / "curves.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def record(self, *rows: dict[str, float]) -> None:
        """Append rows to the curves."""
        with (self.path / "curves.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def cut_curves(self, step: int) -> None:
        """Drop the rows that a resumed run will write again: those of `step` and later."""
        rows = [json.dumps(row) + "\n" for row in self.curves if row["step"] < step]
        self._write("curves.jsonl", "".join(rows).encode())

    def checkpoint(self, step: int, weights: dict[str, Tensor], settings: dict[str, Any]) -> Path:
        """Write the weights at a step."""
        folder = f"checkpoints/step-{step}"
        (self.path / folder).mkdir(parents=True, exist_ok=True)
        self._write_json(f"{folder}/settings.json", settings)
        self._write_tensors(f"{folder}/model.safetensors", weights)
        return self.path / folder

    def checkpoints(self) -> dict[int, Path]:
        """Folders of the checkpoints by step."""
        folders = (self.path / "checkpoints").glob("step-*")
        return dict(sorted((int(f.name.removeprefix("step-")), f) for f in folders))

    def save_state(self, state: dict[str, Tensor]) -> None:
        """Replace the state from which a killed run resumes."""
        self._write_tensors("resume.safetensors", state)

    def load_state(self) -> dict[str, Tensor] | None:
        """State of a run that was killed, else None."""
        path = self.path / "resume.safetensors"
        return load_file(path) if path.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the run complete."""
        self._write_json("complete.json", summary)
        (self.path / "resume.safetensors").unlink(missing_ok=True)

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text()) if path.exists() else None

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        self._write(name, (json.dumps(content, indent=1) + "\n").encode())

    def _write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        with replaced(self.path / name) as part:
            save_file({key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}, part)

    def _write(self, name: str, content: bytes) -> None:
        with replaced(self.path / name) as part:
            part.write_bytes(content)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and threads of this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "gradlogz": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
    }
