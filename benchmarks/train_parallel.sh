#!/bin/bash
# On a machine with two GPUs: the small preset with experts over both (NCCL), eager and as whole
# steps, saved, resumed on one GPU and the other way round, exported. About a minute and a half.
#
#   bash benchmarks/train_parallel.sh [folder]
#
# PYTHON: the interpreter, by default python. MORE: further options of train, such as
# --no-deterministic, or --device cpu --preset tiny to try the script without GPUs. The last line is
# OK, or the script ends with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-$(mktemp -d)}
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
read -ra MORE <<< "${MORE:-}"
COMMON=(train --preset small --batch-size 16 "${MORE[@]}")

run() {
    echo "== $*"
    local began=$SECONDS
    "$@"
    echo "== $((SECONDS - began)) s"
}

# Two ranks share the experts: 20 steps, checkpoints at 10 and 20.
run "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m moe_graphs \
    "${COMMON[@]}" --ep 2 --dp-shard 2 --steps 20 --checkpoint-every 10 --out "$OUT/two"
# One GPU goes on from what they have saved.
run "$PYTHON" -m moe_graphs "${COMMON[@]}" --impl none --steps 24 --resume "$OUT/two" --out "$OUT/one"
# Two go on from what one has saved, on another layout, as whole steps; --nproc starts them.
run "$PYTHON" -m moe_graphs "${COMMON[@]}" --nproc 2 --impl full_iteration --optimizer-in-graph \
    --steps 32 --resume "$OUT/one" --out "$OUT/again"
run "$PYTHON" -m moe_graphs export "$OUT/two" --out "$OUT/two.safetensors"

"$PYTHON" - "$OUT" <<'CHECK'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
runs = {name: json.loads((out / name / "summary.json").read_text()) for name in ("two", "one", "again")}
for name, summary in runs.items():
    print(name, {k: summary[k] for k in ("steps", "train_loss", "held_out_bits_per_byte",
                                         "tokens_per_second", "resumed_from", "differences")})
assert [summary["steps"] for summary in runs.values()] == [20, 24, 32]
assert runs["one"]["train_loss"] < runs["two"]["train_loss"], "the loss did not go on falling"
assert runs["again"]["train_loss"] < runs["one"]["train_loss"], "the loss did not go on falling"
assert runs["again"]["report"]["state"] == "captured", runs["again"]["report"]
CHECK
echo "OK: $OUT"
