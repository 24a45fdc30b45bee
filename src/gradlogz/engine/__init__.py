"""Work on many processes or machines: items with ids become states, which are read in the order of the ids.

    run_items(function, {"a": 1, "b": 2}, engine=LocalProcesses(2), folder="parts")     -> Results

Each item writes its state to a file of its own, whole or not at all, so that the result does not depend on the engine,
on the number of workers or on interruptions: the same call continues where it stopped.

    InProcess          in this process, one item after the other
    LocalProcesses     on the cores of this machine
    SlurmArray         an array job, by submitit; without Slurm local processes
    RayCluster         tasks of a Ray cluster, by ray

Read next: work_loop.py (the loop), engines.py (who computes), work_folder.py and state_file.py (on disk).
"""

from .engines import ENGINES as ENGINES
from .engines import Engine as Engine
from .engines import InProcess as InProcess
from .engines import LocalProcesses as LocalProcesses
from .engines import RayCluster as RayCluster
from .engines import SlurmArray as SlurmArray
from .engines import engine_of as engine_of
from .work_loop import Results as Results
from .work_loop import run_items as run_items
