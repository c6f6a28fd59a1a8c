# On nvidia-h200: bash drafts/next.sh COMMIT (limit 500 s)
export PYTHONPATH=$PWD LD_LIBRARY_PATH=/opt/torch/.venv/lib/python3.12/site-packages/nvidia/cudnn/lib:$LD_LIBRARY_PATH PYTHONUNBUFFERED=1
mkdir -p $OUT/logs
timeout -s INT -k 5 170 python3 drafts/registers.py 1024,512,mixtral,7168,skewed,128 > $OUT/logs/registers.log 2>&1; cut -c1-150 $OUT/logs/registers.log | tail -130
rm -f moe_graphs/kernels/gemm/*_base.py
timeout -s INT -k 5 110 python3 -m pytest -q -m gpu -n 12 -p no:benchmark -p no:cacheprovider --show-capture=no --tb=short tests/kernels/test_fp8_gpu.py tests/kernels/test_contended_kernels_gpu.py > $OUT/logs/tests.log 2>&1; tail -6 $OUT/logs/tests.log | cut -c1-300
timeout -s INT -k 5 150 python3 benchmarks/moe_layer.py --fp8 --sizes 0,6,5 --rounds 5 --commit $1 --out $OUT/moe_layer.jsonl > $OUT/logs/layer.log 2>&1
python3 - <<'P'
import json,os
for l in open(os.environ["OUT"]+"/moe_layer.jsonl"):
    r=json.loads(l); print({k:r.get(k) for k in ("tokens","hidden","contender","error","train_ms","train_speedup")})
P
