"""Ad hoc: eager against a whole step in one graph, launch-bound model of the benchmark."""

import statistics, sys, time, torch

sys.path.insert(0, "benchmarks")
from torch.utils import _pytree as pytree
from contenders import launch_bound
from moe_graphs.layers import LanguageModel
from moe_graphs.capture.full_iteration import FullIteration
from torch.nn import functional
import dataclasses

for dense in (False, True):
    setting = launch_bound()
    config = setting.config
    if dense:
        config = dataclasses.replace(config, moe=None, ffn_hidden_size=2816)
    for kind in ("eager", "inside", "outside"):
        torch.manual_seed(0)
        model = LanguageModel(config, device="cuda", dtype=torch.bfloat16)
        opt = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(1e-4, device="cuda"), fused=True, capturable=True
        )

        def step(tokens):
            out = model(tokens[:, :-1])
            loss = (
                functional.cross_entropy(
                    out.logits_BSV.flatten(0, 1).float(), tokens[:, 1:].flatten()
                )
                + out.aux_loss
            )
            loss.backward()
            if kind != "outside":
                opt.step()
                opt.zero_grad()
            return loss

        f = (
            step
            if kind == "eager"
            else FullIteration(
                step, model=model, **({"optimizer": opt} if kind == "inside" else {})
            )
        )
        tokens = torch.randint(32768, (2, 1025), device="cuda")

        def once():
            f(tokens)
            if kind == "outside":
                opt.step()
                opt.zero_grad()

        for _ in range(6):
            once()
        torch.cuda.synchronize()
        times, hosts = [], []
        for _ in range(7):
            a = time.perf_counter()
            for _ in range(10):
                once()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - a) * 100)
        for _ in range(20):
            opt.zero_grad()
            torch.cuda.synchronize()
            a = time.perf_counter()
            f(tokens)
            hosts.append((time.perf_counter() - a) * 1e3)
        torch.cuda.synchronize()
        print(
            "dense" if dense else "moe",
            kind,
            f"step {statistics.median(times):.3f} ms",
            f"host of the call {statistics.median(hosts):.3f} ms",
            f"reserved {torch.cuda.memory_reserved() / 2**30:.2f} GiB",
        )
        if kind != "eager":
            r = f._recording
            leaves, s = pytree.tree_flatten(tokens)

            def us(fn):
                best = 9.0
                for _ in range(100):
                    a = time.perf_counter()
                    fn()
                    best = min(best, time.perf_counter() - a)
                return round(best * 1e6, 1)

            print(
                "   guards us",
                us(lambda: r.mismatch(tokens, leaves, s)),
                "modules",
                us(r.modules.check_addresses),
                us(r.modules.mismatch),
                "watched",
                us(r.watched.mismatch),
                "load",
                us(lambda: r.inputs.load(leaves)),
                "grads",
                us(r.gradients.mismatch),
                us(r.gradients.load),
                us(r.gradients.attach),
            )
            from moe_graphs.capture.static_inputs import owned_leaves

            print("   owned", us(lambda: owned_leaves(r.outputs)))
            torch.cuda.synchronize()

            def synced():
                best = 9.0
                for _ in range(20):
                    torch.cuda.synchronize()
                    a = time.perf_counter()
                    r.graph.replay()
                    best = min(best, time.perf_counter() - a)
                return round(best * 1e6, 1)

            print("   launch of the graph us", synced())
            torch.cuda.synchronize()
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record()
            for _ in range(10):
                r.graph.replay()
            e1.record()
            torch.cuda.synchronize()
            print("   graphs back to back", e0.elapsed_time(e1) / 10, "ms", f.report())
            f.release()
        del f, model, opt, step
        import gc

        gc.collect()
        torch.cuda.empty_cache()
