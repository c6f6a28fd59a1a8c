"""Text of the packages that are installed beside this Python, as one file to train on.

    python benchmarks/installed_text.py /tmp/text.jsonl
    moe-graphs train --data /tmp/text.jsonl

A document is a file of code or prose (`SUFFIXES`) of a package, without a second copy, and without
files over 512 KiB, which are generated. The line that is printed says how much there is of which
packages. On the GPU machine of the results this is ten times as much as Python's library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = {".py", ".pyi", ".md", ".rst"}
LARGEST = 512 * 1024


def documents(root: Path) -> Iterator[tuple[str, str]]:
    """Package and text of each document, in the order of the files' names."""
    known = set()
    for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()):
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if not 0 < len(content) <= LARGEST or digest in known:
            continue
        known.add(digest)
        try:
            yield path.relative_to(root).parts[0], content.decode()
        except UnicodeDecodeError:
            continue


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="to write, .jsonl")
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_path("purelib")))
    options = parser.parse_args(arguments)
    sizes: Counter[str] = Counter()
    count = 0
    with options.file.open("w") as file:
        for package, text in documents(options.root):
            file.write(json.dumps({"text": text}) + "\n")
            sizes[package] += len(text.encode())
            count += 1
    largest = dict(sizes.most_common(12))
    print(json.dumps({"documents": count, "bytes": sum(sizes.values()), "largest": largest}))


if __name__ == "__main__":
    main()
