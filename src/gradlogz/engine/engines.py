"""Engines: who computes the items of a piece of work. All return the same results.

    outcomes(call, items)     yields (number of the item, ItemOutcome) in the order in which items end

An item that raises has failed. An item whose worker died (killed, out of memory, lost node) is tried again. Items are
computed with one thread everywhere, because the last digits of sums depend on the number of threads.

Read next: work_loop.py (which calls them).
"""

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from itertools import islice
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._input_errors import InputValueError, MissingPackageError

LOGGER = logging.getLogger(__name__)
ATTEMPTS = 3  # of an item whose worker dies
POLL = 0.5  # seconds between two looks at the jobs of a cluster


class ItemOutcome(NamedTuple):
    """The value of an item, or the text of its error.

    Attributes:
        died: the worker died without an answer.
    """

    value: Any = None
    error: str = ""
    died: bool = False


Call = Callable[[Any], Any]
ItemOutcomes = Generator[tuple[int, ItemOutcome], None, None]  # the number of an item, and its outcome


class Engine(ABC):
    """Computes call(item) for every item."""

    @abstractmethod
    def outcomes(self, call: Call, items: Sequence[Any]) -> ItemOutcomes:
        """Yield the number and the outcome of every item, in the order in which they end.

        Closing the iterator stops the computation.
        """


class InProcess(Engine):
    """One item after the other, in this process."""

    def outcomes(self, call: Call, items: Sequence[Any]) -> ItemOutcomes:
        for number, item in enumerate(items):
            yield number, _tried(call, item)


class LocalProcesses(Engine):
    """Processes on this machine.

    Args:
        workers: number of processes; that of the cores by default.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            problem = f"workers must be positive, got {workers}"
            raise InputValueError("LocalProcesses", "workers", problem, "Leave it out for all cores.")
        self.workers = workers or os.cpu_count() or 1

    def outcomes(self, call: Call, items: Sequence[Any]) -> ItemOutcomes:
        left = list(range(len(items)))
        while left:
            ended: set[int] = set()
            running: dict[Future[ItemOutcome], int] = {}
            waiting = iter(left)
            pool = _pool(min(self.workers, len(left)))
            try:
                while True:
                    for number in islice(waiting, self.workers - len(running)):
                        running[pool.submit(_tried, call, items[number])] = number
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        outcome = future.result()
                        ended.add(number := running.pop(future))
                        yield number, outcome
            except BrokenProcessPool:  # a process died: the items that may have killed it run alone
                pass
            finally:
                _stop(pool)
            if running:
                LOGGER.warning("a process died; %d items that it may have computed run alone", len(running))
            for number in sorted(running.values()):
                ended.add(number)
                yield number, self._alone(call, items[number])
            left = [number for number in left if number not in ended]

    def _alone(self, call: Call, item: Any) -> ItemOutcome:
        """The outcome of an item in a process of its own."""
        for _ in range(ATTEMPTS - 1):
            pool = _pool(1)
            try:
                return pool.submit(_tried, call, item).result()
            except BrokenProcessPool:
                continue
            finally:
                _stop(pool)
        return ItemOutcome(error=f"its process died in {ATTEMPTS} attempts", died=True)


class SlurmArray(Engine):
    """Array job of Slurm, by submitit; where there is no Slurm, its local processes.

    Args:
        folder: folder of submitit's scripts and logs, on a file system that all nodes share.
        workers: most jobs at a time.
        options: parameters of submitit's executor, such as timeout_min, slurm_partition or gpus_per_node.
    """

    def __init__(self, folder: str | os.PathLike[str], workers: int | None = None, **options: Any) -> None:
        _check_package("submitit", "slurm")
        self.folder, self.workers, self.options = Path(folder), workers or os.cpu_count() or 1, options

    def outcomes(self, call: Call, items: Sequence[Any]) -> ItemOutcomes:
        left = list(range(len(items)))
        for attempt in range(ATTEMPTS):
            died = []
            for number, outcome in self._jobs(call, items, left):
                if outcome.died and attempt < ATTEMPTS - 1:
                    died.append(number)
                else:
                    yield number, outcome
            left = sorted(died)
            if not left:
                return
            LOGGER.warning("%d jobs died and are submitted again", len(left))

    def _jobs(self, call: Call, items: Sequence[Any], left: list[int]) -> ItemOutcomes:
        """Submit these items, at most `workers` at a time, and yield their outcomes."""
        import submitit

        executor = submitit.AutoExecutor(folder=self.folder)
        executor.update_parameters(slurm_array_parallelism=self.workers, **{"timeout_min": 24 * 60, **self.options})
        # Slurm limits an array by itself; local processes all start at once, and are submitted in groups.
        size = len(left) if executor.cluster == "slurm" else self.workers
        for first in range(0, len(left), size):
            numbers = left[first : first + size]
            jobs = executor.map_array(_tried, [call] * len(numbers), [items[number] for number in numbers])
            pending = dict(zip(numbers, jobs, strict=True))
            try:
                for job in submitit.helpers.as_completed(jobs, poll_frequency=POLL):
                    number = next(n for n, each in pending.items() if each is job)
                    del pending[number]
                    error = job.exception()
                    yield (
                        number,
                        job.result() if error is None else ItemOutcome(error=_last_line(str(error)), died=True),
                    )
            finally:
                for job in pending.values():
                    job.cancel(check=False)


class RayCluster(Engine):
    """Tasks of a Ray cluster, which tries those of a dead worker or node again.

    Args:
        address: "auto" for the cluster of this machine, HOST:PORT, or None to start one here.
        workers: most tasks at a time; as many as the cluster has room for by default.
        gpus: GPUs of a task; with 0 its worker sees none.
    """

    def __init__(self, address: str | None = None, workers: int | None = None, gpus: float = 0.0) -> None:
        _check_package("ray", "cluster")
        self.address, self.workers, self.gpus = address, workers, gpus

    def outcomes(self, call: Call, items: Sequence[Any]) -> ItemOutcomes:
        import ray

        begun = not ray.is_initialized()
        if begun:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
            ray.init(address=self.address, num_cpus=None if self.address else self.workers, log_to_driver=False)
        task: Any = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=ATTEMPTS - 1)(_tried)
        reference = ray.put(call)
        most = self.workers or max(1, 2 * int(ray.cluster_resources().get("CPU", 1)))
        running: dict[Any, int] = {}
        waiting = iter(enumerate(items))
        try:
            while True:
                for number, item in islice(waiting, most - len(running)):
                    running[task.remote(reference, item)] = number
                if not running:
                    return
                done, _ = ray.wait(list(running), num_returns=1)
                for each in done:
                    yield running.pop(each), _answer(each)
        finally:
            for each in running:
                ray.cancel(each, force=True)
            if begun:
                ray.shutdown()


ENGINES = ("process", "processes", "slurm", "ray")


def engine_of(
    call: str,
    name: str,
    *,
    workers: int | None = None,
    folder: Path | None = None,
    address: str | None = None,
    gpus: int = 0,
) -> Engine:
    """The engine of this name: "process", "processes", "slurm" or "ray"; gpus: those of an item, on a cluster."""
    if name not in ENGINES:
        problem = f"engine must be one of {', '.join(ENGINES)}, got {name!r}"
        raise InputValueError(call, "engine", problem, "Choose processes for the cores of this machine.")
    if address is not None and name != "ray":
        problem = f"address is that of a Ray cluster, but the engine is {name}"
        raise InputValueError(call, "address", problem, "Choose the engine ray, or drop the address.")
    if gpus and name not in ("slurm", "ray"):
        problem = f"gpus are those that a cluster gives to a part, but the engine is {name}"
        raise InputValueError(call, "gpus", problem, "Choose the engine ray or slurm, or drop gpus.")
    if name == "process":
        return InProcess()
    if name == "processes":
        return LocalProcesses(workers)
    if name == "ray":
        return RayCluster(address, workers, gpus)
    if folder is None:
        problem = "the engine slurm needs a folder that all nodes share, but there is none"
        raise InputValueError(call, "folder", problem, "Name the folder of the finished parts.")
    return SlurmArray(folder / "jobs", workers, **({"gpus_per_node": gpus} if gpus else {}))


def _tried(call: Call, item: Any) -> ItemOutcome:
    """The outcome of an item, in the worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return ItemOutcome(call(item))
    except Exception:  # any error of the item; the others go on
        return ItemOutcome(error=traceback.format_exc(limit=-4).strip())
    finally:
        torch.set_num_threads(threads)


def _answer(reference: Any) -> ItemOutcome:
    import ray

    try:
        return ItemOutcome(*ray.get(reference))
    except ray.exceptions.RayError as error:
        return ItemOutcome(error=_last_line(str(error)), died=True)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "the worker died"


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker)


def _begin_worker() -> None:
    """Ignore interrupts, which the parent process handles; end with the parent process, also if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the workers without waiting for the items that they compute."""
    processes = list((pool._processes or {}).values())
    for process in processes:
        process.terminate()
    pool.shutdown(cancel_futures=True)


def _check_package(name: str, extra: str) -> None:
    if find_spec(name) is None:
        remedy = f"Install it with: pip install 'gradlogz[{extra}]'."
        raise MissingPackageError("engine", name, f"{name} is needed for this engine and is not installed", remedy)
