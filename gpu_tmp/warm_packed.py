import sys
sys.path[:0] = ["src", "benchmarks"]
import torch, attention_gpu as ag
size, causal = int(sys.argv[1]), sys.argv[2] == "1"
seg = torch.arange(8, device="cuda").repeat_interleave(512).unsqueeze(0)
for shape, s in (((32, 16, 512, size), None), ((4, 16, 4096, size), seg)):
    f, b = ag.step_of_documents(shape, causal, s); f(); b()
torch.cuda.synchronize(); print("warm", size, causal, flush=True)
