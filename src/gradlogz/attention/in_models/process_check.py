"""Check that every process of a group begins the same work, before one of them would wait for the others in vain.

A collective operation would itself wait: each process writes to the store of torch.distributed instead, and waits there
for a limited time.

Read next: monitoring.py, which joins rows over processes.
"""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..._errors import InputRuntimeError

PATIENCE = timedelta(minutes=5)
_begun: Counter[str] = Counter()  # how often this process has begun each call, in each group


def await_processes(call: str, group: Any) -> None:
    """Wait until each process of a group has made this call as often as this one; raise after PATIENCE."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    store, place = dist.distributed_c10d._get_default_store(), f"gradlogz/{call}/{'-'.join(map(str, ranks))}"
    keys = {rank: f"{place}/{_begun[place]}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], "begun")
    try:
        store.wait(list(keys.values()), PATIENCE)
    except dist.DistStoreError:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        store.delete_key(keys[dist.get_rank()])
        problem = f"all processes of the group must make this call, but ranks {missing} did not within {PATIENCE}"
        remedy = 'Make it in every process, name the processes by group=, or pass group="local".'
        raise InputRuntimeError(call, "group", problem, remedy) from None
    _begun[place] += 1
