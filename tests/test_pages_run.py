"""The Python of pages runs: from top to bottom, or a block with what a reader has already."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed import run_distributed
from lm_runs import small_preset
from moe_graphs.layers import LanguageModel
from moe_graphs.layout import ParallelConfig
from moe_graphs.parallel.mesh import make_mesh

# What needs GPUs in a block, and what does the same without one.
WITHOUT_GPUS = {
    '"cuda"': '"cpu"',
    'dispatcher="symmetric"': 'dispatcher="all_gather"',
    "microbatch_shape=(2, 4096)": "microbatch_shape=(2, 16)",
}
DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


BLOCKS, PIPELINE = blocks("many_gpus.md"), "pipeline_stages("


@pytest.mark.parametrize(("page", "replays"), [("own_block.md", 3 * 2), ("concepts.md", 5 * 2)])
def test_the_blocks_of_a_page_run_one_after_the_other(page, replays, tmp_path, capsys):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    graphs = runpy.run_path(str(script))["graphs"]
    assert "captured" in capsys.readouterr().out
    assert graphs.report().matched == replays


# ---- docs/many_gpus.md, without a GPU


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(256, (rows, 16), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logits_BSV.float().square().mean()


def run_block(block: str, layout: ParallelConfig, path: Path | None = None) -> dict[str, Any]:
    """The names that a block leaves, run with what a reader has already."""
    model = LanguageModel(small_preset().model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = dict(
        ranks=layout.world_size, layout=layout, mesh=make_mesh(layout, "cpu"), model=model,
        config=small_preset().model, loss_of=loss_of, tokens=tokens(), update=optimizer.step,
        inputs_BS=tokens(16), targets_BS=tokens(16), path=path,
    )  # fmt: skip
    for on_gpus, here in WITHOUT_GPUS.items():
        block = block.replace(on_gpus, here)
    exec(compile(block, "docs/many_gpus.md", "exec"), names)
    return names


@pytest.mark.parametrize(
    "block", [each for each in BLOCKS if PIPELINE not in each], ids=lambda text: text[:48]
)
def test_a_block_about_many_gpus_runs_on_one_rank(block, tmp_path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        names = run_block(block, ParallelConfig(), tmp_path / "saved")
    finally:
        dist.destroy_process_group()
    assert "dcp.save" not in block or any(names["path"].iterdir())
    assert not any(parameter.is_meta for parameter in names["model"].parameters())


def of_the_pipeline(rank: int, ranks: int, block: str) -> float:
    return run_block(block, ParallelConfig(pp=ranks))["loss"].item()


def test_the_block_about_pipelines_runs_on_two_ranks():
    (block,) = [each for each in BLOCKS if PIPELINE in each]
    first, last = run_distributed(of_the_pipeline, 2, arguments=(block,))
    assert first == 0
    assert last > 1
