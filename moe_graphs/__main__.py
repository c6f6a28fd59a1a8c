"""``python -m moe_graphs``, and under torchrun ``torchrun ... -m moe_graphs train``."""

from __future__ import annotations

from moe_graphs.cli import main

if __name__ == "__main__":
    main()
