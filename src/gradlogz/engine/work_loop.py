"""The loop over the items of a piece of work: those that are not finished are computed, all are returned.

Read next: engines.py (who computes), work_folder.py (where states are).
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .._input_errors import MissingPackageError
from .._progress import Clock
from .engines import Call, Engine, InProcess, ItemOutcome
from .state_file import Modules
from .work_folder import ITEMS, WorkFolder, check_ids

LOGGER = logging.getLogger(__name__)


class Results(NamedTuple):
    """States of the finished items in the order of the ids, and the errors of the others.

    Attributes:
        states: {id: state}.
        failures: {id: text of the error}, for items that raised or whose workers died.
        interrupted: whether Ctrl-C ended the work; items that did not begin are in neither.
    """

    states: dict[str, Any]
    failures: dict[str, str]
    interrupted: bool = False


def run_items(
    function: Call,
    items: Mapping[str, Any],
    *,
    engine: Engine | None = None,
    folder: str | os.PathLike[str] | WorkFolder | None = None,
    facts: Mapping[str, Any] | None = None,
    restart: bool = False,
    modules: Modules | None = None,
    call: str = "run_items",
    progress: Callable[[int, int], None] | None = None,
) -> Results:
    """Compute function(item) for every item that is not finished, and return the states of all.

    The states do not depend on the engine, on the number of workers or on earlier interruptions, if `function` depends
    on its item alone.

    Args:
        function: a function of one item that can be pickled; its state is made of tensors, numbers, text, lists,
            tuples, dicts and NamedTuples of this package if there is a folder.
        items: items by id, such as {"point-1": ...}; ids are file names.
        engine: who computes; this process by default.
        folder: folder of the finished items, from which the same call continues, or one that the caller has opened;
            none by default.
        facts: what the items depend on, as JSON values; a folder with other facts is refused.
        restart: begin again in a folder that has finished items.
        modules: {module: names} with NamedTuples outside of this package.
        call: function or command in errors.
        progress: called with the number of finished items and their total.

    Law: tests/faults/test_work_continues_where_it_stopped.py.

    >>> run_items(len, {"a": "one", "b": "three"}).states
    {'a': 3, 'b': 5}
    """
    check_ids(call, items)
    if folder is not None and find_spec("safetensors") is None:
        remedy = "Install it with: pip install 'gradlogz[probe]'."
        raise MissingPackageError(call, "safetensors", "safetensors is needed to write finished items", remedy)
    engine = engine or InProcess()
    with ExitStack() as stack:
        known: dict[str, Path] = {}
        if folder is None or isinstance(folder, WorkFolder):
            place = folder
        else:
            place = WorkFolder(call, Path(folder), facts or {}, restart=restart)
            stack.enter_context(place.opened())
        if place is not None:
            known = {name: path for name, path in place.finished().items() if name in items}
            place.log("begin", items=len(items), finished=len(known), engine=type(engine).__name__)
        left = [name for name in sorted(items) if name not in known]
        states: dict[str, Any] = {}
        failures: dict[str, str] = {}
        interrupted = False
        outcomes = stack.enter_context(closing(_outcomes(engine, function, items, left, place)))
        show, clock = progress or (lambda *_: None), Clock()
        LOGGER.info("%s: %d items, of which %d are finished, %s", call, len(items), len(known), type(engine).__name__)
        try:
            clock.tick(len(known))
            show(len(known), len(items))
            for name, outcome in outcomes:
                if outcome.error:
                    failures[name] = outcome.error
                else:
                    states[name] = outcome.value.state
                clock.tick(done := len(known) + len(states) + len(failures))
                _log(place, name, outcome, f"{done} of {len(items)}{clock.left(len(items))}")
                show(done, len(items))
        except KeyboardInterrupt:
            LOGGER.info("%s: interrupted", call)
            interrupted = True
        if place is not None:
            known |= {name: place.path / ITEMS / state for name, state in states.items()}
            states = {name: place.read(name, path, modules) for name, path in known.items()}
            place.log("end", finished=len(states), failed=len(failures), interrupted=interrupted)
    return Results({name: states[name] for name in sorted(states)}, dict(sorted(failures.items())), interrupted)


class _Answer(NamedTuple):
    """State of an item, or the name of its file; the seconds that it took; host and process."""

    state: Any
    seconds: float
    worker: str


def _outcomes(
    engine: Engine, function: Call, items: Mapping[str, Any], left: list[str], place: WorkFolder | None
) -> Generator[tuple[str, ItemOutcome], None, None]:
    """Yield the id and the outcome of each item that is left."""
    work = partial(_computed, function, place)
    with closing(engine.outcomes(work, [(name, items[name]) for name in left])) as outcomes:
        for number, outcome in outcomes:
            yield left[number], outcome


def _computed(function: Call, place: WorkFolder | None, named: tuple[str, Any]) -> _Answer:
    """Compute one item, in the worker; its state is returned, or written if there is a folder."""
    name, item = named
    begun = time.perf_counter()
    state = function(item)
    if place is not None:
        state = place.write(name, state).name
    return _Answer(state, time.perf_counter() - begun, f"{socket.gethostname()}:{os.getpid()}")


def _log(place: WorkFolder | None, name: str, outcome: ItemOutcome, progress: str) -> None:
    """Log the end of an item, and append it to the events of the folder, if there is one."""
    if outcome.error:
        LOGGER.warning("%s failed (%s): %s", name, progress, outcome.error.splitlines()[-1])
        LOGGER.debug("%s", outcome.error)
        facts = {"error": outcome.error, "died": outcome.died}
    else:
        LOGGER.info("%s finished in %.1f s (%s)", name, outcome.value.seconds, progress)
        facts = {"seconds": round(outcome.value.seconds, 3), "worker": outcome.value.worker}
    if place is not None:
        place.log("failed" if outcome.error else "finished", item=name, **facts)
