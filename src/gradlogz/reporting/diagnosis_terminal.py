"""The diagnosis of a machine on a terminal: versions, devices, calls, and what is missing."""

import math
import shlex

from rich.text import Text

from ..diagnosis.packages import PURPOSES, missing_extras
from ..diagnosis.records import Diagnosis
from .result_table import result_table

HEADS = ("call", "kernel", "error", "time", "of")


def diagnosis_lines(diagnosis: Diagnosis, width: int) -> list[Text]:
    """Lines of at most `width` columns; a column of times is in units of the rival's time."""
    lines = [Text.assemble((f"{name:<14}", "bold"), value) for name, value in diagnosis.versions.items()]
    for device in diagnosis.devices:
        calls = [call for call in diagnosis.calls if call.device.partition(":")[0] == device.name.partition(":")[0]]
        lines += [Text(), Text.assemble((device.name, "bold"), f": {device.description}")]
        if calls and (":" not in device.name or any(call.device == device.name for call in calls)):
            rows = [(c.call, c.kernel, f"{c.error:.0e}", f"{c.ratio:.2f}", c.rival) for c in calls]
            lines += result_table(HEADS, rows, ["holds" if c.passes else "fails" for c in calls], width)
            noise = max((abs(c.again - 1) for c in calls if not math.isnan(c.again)), default=math.nan)
            lines.append(
                Text(f"time: in units of that of the rival; rival / rival differs from 1 by up to {noise:.2f}")
            )
    return [*lines, Text(), *_missing_lines(diagnosis)]


def _missing_lines(diagnosis: Diagnosis) -> list[Text]:
    missing = missing_extras(diagnosis.packages)
    if not missing:
        return [Text("All packages of the extras are installed.")]
    lines = [Text("Not installed", "bold")]
    for extra, names in missing.items():
        command = f"pip install {shlex.quote(f'gradlogz[{extra}]')}"
        lines += [Text(f"{PURPOSES[extra]}: {', '.join(names)}"), Text(f"  {command}")]
    return lines
