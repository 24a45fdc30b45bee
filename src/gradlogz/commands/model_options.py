"""Options of commands that load a model.

    --device, --device-map                   where it computes
    --allow-pickle, --allow-remote-code      what its files may do

Read next: probe.py, merge.py (which have them), ../probing/inside/loading.py (what they permit).
"""

from typing import Annotated

import typer

Device = Annotated[
    str | None,
    typer.Option(help="Device: cpu, cuda, cuda:1, … (default: GPU if available).", show_default=False),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Placement by transformers: auto, sequential, or a JSON object (default: none).", show_default=False
    ),
]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="Allow reading pickled weights (as plain tensors).")]
AllowRemoteCode = Annotated[
    bool, typer.Option("--allow-remote-code", help="Allow running code shipped with the model.")
]
