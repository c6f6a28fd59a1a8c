"""A store for one start of torchrun's workers.

torchrun (torch 2.13) gives workers that it starts again the store of the workers before, with its
keys. So gloo finds addresses of processes that are gone. torchrun's count of restarts does not tell
the starts apart, because an agent does not count restarts after another host's worker has died.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

_PAUSE = 0.02  # seconds between looks


def fresh_store(store: Store, rank: int, size: int, patience: timedelta) -> Store:
    """``store`` under a prefix that no start before had, the same on all ranks.

    Rank 0 chooses the prefix. Every other rank asks for it under a random name and gets the answer
    under that name. Rank 0 answers until all ranks have the prefix, because the question of a
    process that is gone may still be there.

    Raises:
        TimeoutError: if a rank has not come in time.
    """
    until = time.monotonic() + patience.total_seconds()
    if rank == 0:
        prefix = uuid.uuid4().hex
        missing, answered = set(range(1, size)), set[str]()
        while missing:
            for other in sorted(missing):
                asked = f"ask {other}"
                if store.check([asked]) and (name := store.get(asked).decode()) not in answered:
                    store.set(f"answer {name}", prefix)
                    answered.add(name)
            missing = {other for other in missing if not store.check([f"{prefix} {other}"])}
            _pause(until, f"ranks {sorted(missing)}")
    else:
        name = uuid.uuid4().hex
        store.set(f"ask {rank}", name)
        while not store.check([f"answer {name}"]):
            _pause(until, "rank 0")
        prefix = store.get(f"answer {name}").decode()
        store.set(f"{prefix} {rank}", "here")
    return PrefixStore(prefix, store)


def _pause(until: float, who: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(f"{who} did not come in time")
    time.sleep(_PAUSE)
