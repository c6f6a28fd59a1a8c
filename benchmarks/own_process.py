"""Contenders in processes of their own, and the lines that a benchmark leaves of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def in_own_process(file: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """The result of ``file --one arguments``, which prints it as JSON at the end; or its error."""
    command = [sys.executable, file, "--one", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {timeout:.0f} s"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:500]}
    return {"error": None} | json.loads(last)


def leave(line: dict[str, Any], shown: Sequence[str], out: str | None) -> None:
    """Print what is shown of a line, and append the line to a file, if there is one."""
    print(json.dumps({key: line.get(key) for key in shown}), flush=True)
    if out:
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")
