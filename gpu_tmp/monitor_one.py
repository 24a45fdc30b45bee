import sys, json, cProfile, pstats, io, time
sys.path[:0] = ["src", "benchmarks"]
import torch, gradlogz
import monitor_gpu as mg
gpt, llama = mg.SUBJECTS
which = sys.argv[1]
for subject, compiled, on_attend in {"g": ((gpt, True, True), (gpt, True, False)), "l": ((llama, True, False),)}[which]:
    print(json.dumps(mg.measured(subject, compiled, on_attend, False)), flush=True)
    torch.cuda.empty_cache()
for on_attend in (True, False) if which == "g" else ():
    torch._dynamo.reset()
    with torch.device("cuda"):
        model = gpt.build(False).train()
    if on_attend: gradlogz.register(model)
    call = torch.compile(model)
    opt = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (16, 1024), device="cuda")
    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(); opt.step(); opt.zero_grad()
    def host(n=10):
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(n): step()
        a=time.perf_counter()-t; torch.cuda.synchronize(); return round(1e3*a/n, 1), round(1e3*(time.perf_counter()-t)/n, 1)
    for _ in range(3): step()
    print("on attend", on_attend, "plain host, total ms", host(), host())
    with gradlogz.monitor(call, every=1, thresholds=mg.QUIET) as m:
        for _ in range(3): step()
        print("monitored host, total ms", host(), host(), "by operator", m._passes._by_operator)
        p = cProfile.Profile(); p.enable()
        for _ in range(5): step()
        p.disable()
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            step(); torch.cuda.synchronize()
        print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60)[:4500])
    s = io.StringIO(); pstats.Stats(p, stream=s).sort_stats("tottime").print_stats(22)
    print(s.getvalue()[:3800])
