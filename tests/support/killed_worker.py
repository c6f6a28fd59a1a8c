"""The command line in a worker that, at its first start, is killed while step 4 is being saved.

    torchrun ... tests/support/killed_worker.py train ...

Its own files are complete then, the training goes on in the other thread, and nothing is published.
"""

from __future__ import annotations

import os
import signal

from moe_graphs.cli import main
from moe_graphs.lm.checkpoint import Checkpoints

STEP = 4
_publish = Checkpoints._publish


def _publish_or_die(self, written, partial, step, settings):
    if step == STEP:
        written.result()
        os.kill(os.getpid(), signal.SIGKILL)
    return _publish(self, written, partial, step, settings)


if __name__ == "__main__":
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Checkpoints._publish = _publish_or_die
    main()
