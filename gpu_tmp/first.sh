export PYTHONPATH=src PYTHONUNBUFFERED=1
t() { echo "== $(date +%T) $*"; }
t warm
for k in 0 4 8; do GRADLOGZ_SPLIT=$k timeout 120 python3 gpu_tmp/split.py warm > /tmp/warm$k.log 2>&1 & done
for s in 64 128; do for c in 0 1; do timeout 170 python3 gpu_tmp/warm_packed.py $s $c > /tmp/pw$s$c.log 2>&1 & done; done
timeout 160 python3 -m pytest -q -p no:benchmark -p no:cacheprovider -n 4 tests/device/test_calls_from_cpp_on_a_gpu.py > $OUT/cpp.log 2>&1 &
wait
tail -25 $OUT/cpp.log; cat /tmp/warm?.log /tmp/pw*.log
t split
for k in 0 4 8 0; do GRADLOGZ_SPLIT=$k timeout 60 python3 gpu_tmp/split.py 2>&1 | tee -a $OUT/split.log; done
t ncu
cat > /tmp/one.py <<'P'
import sys; sys.path[:0] = ["src"]
import torch
from gradlogz import attend
x = [torch.randn(4, 16, 4096, int(sys.argv[1]), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
for _ in range(3): attend(*x)
torch.cuda.synchronize()
P
for d in 64 128; do timeout 60 ncu --clock-control none -k regex:_attention -s 1 -c 1 --section WarpStateStats --section ComputeWorkloadAnalysis --section SchedulerStats --section InstructionStats --metrics smsp__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,smsp__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active,smsp__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active,smsp__inst_executed_pipe_fmaheavy.avg.pct_of_peak_sustained_active,smsp__inst_executed_pipe_fmalite.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active,smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio,smsp__average_warp_latency_issue_stalled_math_pipe_throttle.ratio python3 /tmp/one.py $d > $OUT/ncu$d.log 2>&1; grep -E "stall|pipe|Issue|Eligible|Active|Executed Ipc|Warp Cycles|%" $OUT/ncu$d.log | head -60; done
t monitor
timeout 150 python3 gpu_tmp/monitor_one.py g > $OUT/monitor.log 2>&1; head -c 2000 $OUT/monitor.log
t packed
timeout 100 python3 benchmarks/attention_gpu.py packed masks > $OUT/packed.log 2>&1; tail -c 2500 $OUT/packed.log
cp benchmarks/results/attention_gpu.json $OUT/
t end
