# On nvidia-h200: variants of the warps that work beside a product. bash drafts/measure.sh [CASES]
export LD_LIBRARY_PATH=/opt/torch/.venv/lib/python3.12/site-packages/nvidia/cudnn/lib:$LD_LIBRARY_PATH PYTHONUNBUFFERED=1
mkdir -p $OUT/logs
i=0
while read loads parts fetched columns regs little; do
  t=/tmp/v$i; mkdir -p $t; cp -r moe_graphs $t/
  sed -i "s/^FIRST_LOADS = .*/FIRST_LOADS = gl.constexpr($loads)/; s/^PARTS = .*/PARTS = gl.constexpr($parts)/; s/^FETCHED = .*/FETCHED = gl.constexpr($fetched)/" $t/moe_graphs/kernels/gemm/sm90_quantize.py
  sed -i "s/^COLUMNS = .*/COLUMNS = gl.constexpr($columns)/" $t/moe_graphs/kernels/gemm/sm90_columns.py
  sed -i "s/worker_num_regs=\[216, 72, 72, 72, 72\]/worker_num_regs=[$regs, $little, $little, $little, $little]/" $t/moe_graphs/kernels/gemm/sm90_fp8.py
  timeout 170 python3 drafts/measure.py $t "$loads,$parts,$fetched,$columns,$regs" ${1:-1024,512} /tmp/lock > $OUT/logs/v$i.log 2>&1 &
  i=$((i+1))
done <<V
4 1 True 16 216 72
8 1 True 8 216 72
4 1 False 16 216 72
8 2 True 16 216 72
4 1 True 8 224 56
V
wait; cat $OUT/logs/v*.log | cut -c1-200
