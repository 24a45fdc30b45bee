"""gradlogz doctor: diagnose this machine, print versions, kernels and missing packages, write them as JSON.

Read next: ../diagnosis/machine.py (what is measured), ../reporting/diagnosis_terminal.py (the lines).
"""

from typing import Annotated

import typer

from .outputs import Force, check_files, progress, terminal, write_json


def command(
    json: Annotated[
        str | None,
        typer.Option(help="JSON file for the results; - for standard output (default: none).", show_default=False),
    ] = None,
    force: Force = False,
) -> int:
    """Print versions, devices, and for each call the kernel that serves it, its error and its speed.

    Errors are differences from the definition in float64, times are in units of PyTorch's own attention on this
    machine. Lists the packages of extras that are not installed, with the commands that install them.

    The exit status is 1 if a kernel computes something else than its definition.
    """
    from ..diagnosis.machine import diagnose
    from ..page import as_json
    from ..reporting.diagnosis_terminal import diagnosis_lines
    from ..reporting.result_table import print_lines

    console = terminal(json)
    check_files("doctor", {"--json": json}, force=force)
    with progress(console, "Measuring kernels") as update:
        diagnosis = diagnose(update)
    print_lines(console, diagnosis_lines(diagnosis, console.width))
    data = {
        "versions": diagnosis.versions,
        "packages": [package._asdict() for package in diagnosis.packages],
        "devices": [device._asdict() for device in diagnosis.devices],
        "calls": [call._asdict() for call in diagnosis.calls],
    }
    write_json(json, "" if json is None else as_json(data))  # an error that is no number is null
    return 0 if diagnosis.passes else 1
