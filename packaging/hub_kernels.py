"""Packs the kernels as Hugging Face's hub wants kernels that are written in Triton alone.

    python packaging/hub_kernels.py OUT    # then: kernels.get_local_kernel(Path("OUT"))

A kernel of the hub is loaded from any path, several versions in one process: it imports itself by
relative names, and its ops have a name of their own. Both are made here from ``moe_graphs/kernels``
by rewriting, so that nothing stands twice. There is a build for CUDA and one for the CPU, which
runs the references. ``build.toml`` is for the hub's own builder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "moe_graphs" / "kernels"
# The one file beside the folder that kernels import.
BESIDE = ROOT / "moe_graphs" / "portable_launches.py"
NAME, VERSION, LICENSE = "moe-graphs", 1, "Apache-2.0"
BACKENDS = ("cpu", "cuda")
NAMED = re.compile(r'\b(import|from) moe_graphs|\bops\.moe_graphs|"moe_graphs(::|\.)')


def pack(out: Path) -> str:
    """Writes the repository of the kernel to a new folder, and returns the name of its ops.

    Raises:
        FileExistsError: the folder has files.
        ValueError: a name of the package is left that does not exist without it.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} has files: choose a new folder")
    files = {file.relative_to(KERNELS): file.read_text() for file in sorted(KERNELS.rglob("*.py"))}
    files[Path(BESIDE.name)] = BESIDE.read_text()
    number = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:7]
    ops = f"_{NAME.replace('-', '_')}_{number}"
    texts = {place: rewritten(text, place, ops) for place, text in files.items()}
    folders = {backend: out / "build" / f"torch-{backend}" for backend in BACKENDS}
    for folder in (*folders.values(), out / "torch-ext" / NAME.replace("-", "_")):
        for place, text in texts.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text)
    for backend, folder in folders.items():
        about = {
            "name": NAME,
            "id": f"_{NAME.replace('-', '_')}_{backend}_{number}",
            "version": VERSION,
            "license": LICENSE,
            "python-depends": ["einops"],
            "backend": {"type": backend},
        }
        (folder / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    listed = ", ".join(f'"{backend}"' for backend in BACKENDS)
    (out / "build.toml").write_text(
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nlicense = "{LICENSE}"\n'
        f'backends = [{listed}]\npython-depends = ["einops"]\n\n[torch-noarch]\n'
    )
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return ops


def rewritten(text: str, place: Path, ops: str) -> str:
    """The text of a file with relative imports, and with its ops under the name ``ops``."""
    depth = len(place.parts)
    text = re.sub(r"\bfrom moe_graphs\.kernels import", f"from {'.' * depth} import", text)
    text = re.sub(r"\bfrom moe_graphs import", f"from {'.' * depth} import", text)
    text = re.sub(r"\bfrom moe_graphs\.kernels\.", f"from {'.' * depth}", text)
    text = text.replace(
        'import_module(f"moe_graphs.kernels.gemm.', 'import_module(f"{__package__}.'
    )
    text = text.replace('"moe_graphs::', f'"{ops}::').replace(
        "torch.ops.moe_graphs", f"torch.ops.{ops}"
    )
    left = [line for line in text.splitlines() if NAMED.search(line)]
    if left:
        raise ValueError(f"{place} still names the package: {left}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    print(f"{out}: kernels for {', '.join(BACKENDS)}, whose ops are torch.ops.{pack(out)}")


if __name__ == "__main__":
    main()
