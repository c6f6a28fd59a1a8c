"""Real runs side by side: reading a run, failed runs, and the picture."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

import installed_text
import plot_real_runs
import real_runs
from lm_runs import options, small_corpus
from moe_graphs.lm.run import Progress, run

OTHERS = "everything on; everything on, fp32 parameters"
# A stand-in for `train` with the same output. Seed 1 fails, and the given seconds are slept.
STAND_IN = """
import json, pathlib, sys, time
given = dict(zip(sys.argv[1:], sys.argv[2:]))
out, seed = pathlib.Path(given["--out"]), int(given["--seed"])
time.sleep(float(given.get("--batch-size", 0)))
if seed == 1:
    sys.exit("error: no such seed")
out.mkdir()
whole = "--optimizer-in-graph" in given
report = {"replayed": 250, "eager_calls": {"warmup": 3, "context": seed}} if whole else None
log = []
for step in (100, 200, 250):
    log.append({"step": step, "loss": 80 / step, "memory": {"bytes": 2**30}})
    print(f"step:   {step}  loss: 1", flush=True)
    if step < 250:
        print(f"held out: {100 / step:.4f} bits per byte (sample, trained weights)", flush=True)
print("evaluating trained weights on all held-out bytes", flush=True)
summary = {"steps": 250, "held_out_bits_per_byte": 0.4, "seconds": 25.0 - 9 * whole,
           "report": report, "parameters": 7, "tokens_per_second": 1e3}
(out / "log.jsonl").write_text("\\n".join(map(json.dumps, log)))
(out / "summary.json").write_text(json.dumps(summary))
"""


def lines(folder: Path, monkeypatch, *arguments: str) -> list[dict]:
    (folder / "train.py").write_text(STAND_IN)
    monkeypatch.setattr(real_runs, "TRAIN", (sys.executable, "-S", str(folder / "train.py")))
    out = folder / "lines.jsonl"
    common = ("--set", "small", "--folder", str(folder / "runs"), "--out", str(out))
    real_runs.main([*common, "--commit", "c", *arguments])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_what_a_run_has_left_and_printed(tmp_path):
    """Lines are those that `train` printed, times those at which they were printed."""
    given, heard = options(out=tmp_path / "run", save=False), []

    def hear(said: object) -> None:
        heard.append((time.monotonic(), f"{said}\n"))

    summary = run(given, small_corpus(), Progress(line=hear, note=hear))
    found = real_runs.collect(given.out, heard, given.preset.evaluate_every)
    (first, begun, bits), last = found["held_out_curve"]
    assert first == 4
    assert 0 < begun < summary.seconds
    assert bits == pytest.approx(summary.held_out_bits_per_byte, rel=0.5)
    assert last == [8, summary.seconds, summary.held_out_bits_per_byte]
    assert [step for step, _, _ in found["train_curve"]] == [4, 8]
    with pytest.raises(ValueError, match="should have been evaluated"):
        real_runs.collect(given.out, heard, 2)


def test_runs_and_their_picture(tmp_path, monkeypatch, capsys):
    rows = lines(tmp_path, monkeypatch, "--seeds", "0,1,2", "--jobs", "5")
    assert len(rows) == 9
    errors = {(row["contender"], row["seed"]): row["error"] for row in rows}
    off, on, fp32 = real_runs.SETS["small"]
    assert errors[off, 0] is errors[on, 0] is errors[fp32, 0] is errors[off, 2] is None
    assert errors[on, 1] == "exit status 1: error: no such seed"
    assert "'context': 2" in errors[on, 2]
    said = capsys.readouterr().out
    assert "│ everything off" in said
    assert "│ 2 of 3" in said
    (first,) = [row for row in rows if (row["contender"], row["seed"]) == (off, 0)]
    assert 24 < first["seconds_to_target"] <= 25  # all of its output came at once
    plot_real_runs.main([str(tmp_path / "lines.jsonl")])
    assert (tmp_path / "lines.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no line is of a run that ended well"):
        plot_real_runs.draw([row for row in rows if row["error"]])


def test_what_takes_too_long_is_ended(tmp_path, monkeypatch):
    wait = ("--variants", OTHERS, "--seconds", "0.5", "--train", "--batch-size 60")
    ended, not_started = (row["error"] for row in lines(tmp_path, monkeypatch, *wait))
    assert ended.startswith("ended as --seconds are over; exit status -9")
    assert not_started.startswith("not started")


def test_seconds_to_a_loss():
    curve = [[100, 10.0, 2.0], [200, 20.0, 1.0], [300, 40.0, 0.8]]
    assert real_runs.seconds_to(0.9, curve) == pytest.approx(30.0)
    assert real_runs.seconds_to(1.5, curve) == pytest.approx(15.0)
    assert real_runs.seconds_to(0.5, curve) is None


def test_an_unknown_variant_is_refused(capsys):
    with pytest.raises(SystemExit):
        real_runs.main(["--set", "small", "--variants", "everything"])
    assert "['everything'] are none of everything off; everything on" in capsys.readouterr().err


def test_runs_in_fp8_beside_bf16():
    """Differences are those of seeds that both have, and one seed has no interval."""
    bits = {0: 1.0, 1: 2.0, 2: 4.0, 3: 1.0}
    base = [{"seed": seed, "held_out_bits_per_byte": value} for seed, value in bits.items()]
    other = [row | {"held_out_bits_per_byte": row["held_out_bits_per_byte"] * factor}
             for row, factor in zip(base[:3], (1.01, 1.02, 1.03), strict=True)]  # fmt: skip
    assert real_runs.apart(other, base) == "+2.00 +- 2.48 %"
    assert real_runs.apart(other[:1], base) == real_runs.apart(base, base) == "-"


def test_text_of_installed_packages(tmp_path, capsys):
    """Copies, large files and files that are no text are left out."""
    files = {
        "a/b.py": b"x = 1\n", "a/c.py": b"x = 1\n", "d.md": b"# d\n",
        "e.py": b"#" * 600_000, "f.py": b"\xff", "g.so": b"g",
    }  # fmt: skip
    (tmp_path / "a").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "text.jsonl"
    installed_text.main([str(out), "--root", str(tmp_path)])
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [
        "x = 1\n", "# d\n",
    ]  # fmt: skip
    assert json.loads(capsys.readouterr().out)["bytes"] == 10
    installed_text.main([str(out), "--root", str(tmp_path), "--share", "1e-9"])
    assert not out.read_text()
