"""Contenders in processes of their own, and the lines that a benchmark leaves of them."""

from __future__ import annotations

import json
import re
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
        return {"error": _error_of(done.stderr)}
    return {"error": None} | json.loads(last)


def _error_of(stderr: str) -> str:
    """The line that names an exception, or else the last one. A progress bar may follow it."""
    lines = stderr.strip().splitlines() or ["no output"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines)[-1][:500]


def leave(line: dict[str, Any], shown: Sequence[str], out: str | None) -> None:
    """Print what is shown of a line, and append the line to a file, if there is one."""
    print(json.dumps({key: line.get(key) for key in shown}), flush=True)
    if out:
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")
