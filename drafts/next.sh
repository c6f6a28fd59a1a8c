# On nvidia-h200: bash drafts/next.sh COMMIT (limit 450 s)
bash drafts/measure.sh 1024,512
export PYTHONPATH=$PWD LD_LIBRARY_PATH=/opt/torch/.venv/lib/python3.12/site-packages/nvidia/cudnn/lib:$LD_LIBRARY_PATH PYTHONUNBUFFERED=1
timeout -s INT -k 5 100 python3 -m pytest -q -m gpu -n 12 -p no:benchmark -p no:cacheprovider --show-capture=no --tb=short tests/kernels/test_fp8_gpu.py -k "beside or replays" > $OUT/logs/tests.log 2>&1; tail -15 $OUT/logs/tests.log | cut -c1-300
timeout -s INT -k 5 170 python3 benchmarks/moe_layer.py --fp8 --sizes 0,6 --rounds 9 --commit $1 --out $OUT/moe_layer.jsonl > $OUT/logs/layer.log 2>&1
python3 - <<'P'
import json,os
for l in open(os.environ["OUT"]+"/moe_layer.jsonl"):
    r=json.loads(l); print({k:r.get(k) for k in ("tokens","contender","error","forward_ms","train_ms","train_speedup","peak_mib","saved_mib")})
P
