"""Kernels packed for Hugging Face's hub: they work without the package, and beside it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("hub_kernels", ROOT / "packaging" / "hub_kernels.py")
assert SPEC is not None
assert SPEC.loader is not None
hub_kernels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hub_kernels)
# The hub's loader gives a module the name of its build, which is no name of a folder.
USE = """
import importlib.util, json, sys
from pathlib import Path
import torch

folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
packed = sys.modules[name] = importlib.util.module_from_spec(spec)
sys.modules["moe_graphs"] = None  # an import of it is an error
spec.loader.exec_module(packed)

def computed(kernels):
    torch.manual_seed(0)
    x = torch.randn(6, 8, requires_grad=True)
    w = torch.randn(2, 8, 4, requires_grad=True)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    product = kernels.grouped_gemm(kernels.rms_norm(x, torch.ones(8), 1e-6), w, offsets)
    product.square().sum().backward()
    return product, x.grad, w.grad

found = computed(packed)
del sys.modules["moe_graphs"]
import moe_graphs.kernels
assert all(map(torch.equal, found, computed(moe_graphs.kernels)))
print(*sorted({op.partition("::")[0] for op in torch._C._dispatch_get_all_op_names()
               if "moe_graphs" in op}))
"""


def test_the_pack_works_without_the_package_and_beside_it(tmp_path):
    ops = hub_kernels.pack(tmp_path / "pack")
    assert ops == hub_kernels.pack(tmp_path / "again")  # the same sources make the same pack
    folder = tmp_path / "pack" / "build" / "torch-cpu"
    done = subprocess.run(
        [sys.executable, "-c", USE, folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(["moe_graphs", ops])
    with pytest.raises(FileExistsError, match="choose a new folder"):
        hub_kernels.pack(tmp_path / "pack")


def test_builds_differ_in_what_they_say_of_themselves_alone(tmp_path):
    hub_kernels.pack(tmp_path)
    cpu, cuda = (
        {file.relative_to(folder): file.read_text() for file in folder.rglob("*.*")}
        for folder in (tmp_path / "build" / f"torch-{each}" for each in ("cpu", "cuda"))
    )
    different = [name for name, text in cpu.items() if cuda[name] != text]
    assert different == [Path("metadata.json")]
    about = json.loads(cuda[Path("metadata.json")])
    assert about["backend"] == {"type": "cuda"}
    sources = {file.relative_to(hub_kernels.KERNELS) for file in hub_kernels.KERNELS.rglob("*.py")}
    assert sources < cuda.keys()


def test_a_name_of_the_package_that_is_left_is_an_error():
    for line in ("import moe_graphs", "from moe_graphs.engine import graphs", 'x = "moe_graphs.a"'):
        with pytest.raises(ValueError, match="still names the package"):
            hub_kernels.rewritten(line, Path("a.py"), "_ops")
    assert (
        hub_kernels.rewritten("from moe_graphs.kernels.gemm import a", Path("gemm/b.py"), "_ops")
        == "from ..gemm import a"
    )


def test_the_hubs_own_loader_takes_it(tmp_path):
    if not any(each.name == "kernels" for each in importlib.metadata.distributions()):
        pytest.skip("needs the package kernels")
    hub_kernels.pack(tmp_path)
    use = "from pathlib import Path; from kernels import get_local_kernel; " \
          "get_local_kernel(Path.cwd(), backend='cpu').rms_norm"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", use], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
