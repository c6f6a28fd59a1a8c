"""Lightning, under whichever of its two names it is installed."""

from __future__ import annotations

try:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]  # its other name
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

__all__ = ["pl", "rank_zero_info", "rank_zero_warn"]
