"""TRL's three trainers with untouched defaults on one GPU: share replayed, tokens/s, memory.

    python benchmarks/trl_trainers.py --out benchmarks/results/trl_trainers_h200.jsonl
    python benchmarks/trl_trainers.py --trainers sft --smoke

Each trainer runs as it comes, and with `GraphCallback()`. The model is a Qwen3-MoE of 12 small
layers with random weights (`LAUNCH_BOUND` of `fine_tuning.py`) and LoRA on attention. Texts have up
to 1,000 random words, 200 in the middle. Every option of the trainer is at its default but the
number of steps (`--steps`). Each contender runs in a process of its own.

GRPO generates in fp32 with a loop over experts, as TRL's defaults and transformers have it: 256
tokens through 12 layers take more than 13 s a step on an H100. So its model has 4 layers, and
completions have 64 tokens, for both contenders (`OF_GRPO`). `generation_ms` is the time of a step
before its forward with gradients. `--trainers grpo_static` lets transformers compile a step of
generation, which takes a static cache. A run in this process prints where the time of a step goes:
`--one grpo GraphCallback --steps 30 --profiled-step 26`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import TrainerCallback

from environment import stamp
from fine_tuning import LAUNCH_BOUND, SMALL
from own_process import in_own_process, leave

TRAINERS = ("sft", "dpo", "grpo")
STATIC = "_static"  # generation with `cache_implementation="static"`, which is compiled on GPUs
KNOWN = (*TRAINERS, f"grpo{STATIC}")
CONTENDERS = ("as it comes", "GraphCallback")
BEHIND = 20  # steps before what is measured
WORDS = 2000
OF_GRPO = {"num_hidden_layers": 4, "max_completion_length": 64}
OF_SMALL_GRPO = {"num_hidden_layers": SMALL["num_hidden_layers"], "max_completion_length": 16}


class Measured(TrainerCallback):
    """Seconds and real tokens of each step, and the graphs' counts at the end of it.

    If steps generate, the seconds before the first forward with gradients are noted as well.
    """

    def __init__(self, graphed: Any, generates: bool, profiled_step: int | None) -> None:
        self.graphed, self._generates, self._profiled_step = graphed, generates, profiled_step
        self.seconds: list[float] = []
        self.generation: list[float] = []
        self.tokens: list[torch.Tensor] = []
        self.losses: list[float] = []
        self._profiler: Any = None
        self.counts: list[tuple[int, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, args: Any, kwargs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            if self._generates and len(self.generation) < len(self.tokens):
                _wait()
                self.generation.append(time.perf_counter() - self._began)
            self.tokens[-1] = self.tokens[-1] + kwargs["attention_mask"].sum()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        _wait()
        if len(self.seconds) == self._profiled_step:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        self.tokens.append(torch.zeros(()))
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _wait()
        self.seconds.append(time.perf_counter() - self._began)
        if self._profiler is not None:
            self._profiler.stop()
            for order in ("self_cpu_time_total", "self_device_time_total"):
                table = self._profiler.key_averages().table(sort_by=order, row_limit=25)
                print(table, file=sys.stderr)
            self._profiler = None
        if self.graphed is not None:
            report = self.graphed.accelerated.graphs.report()
            eager = {n: c for n, c in report.eager_calls.items() if n != "no_grad"}
            self.counts.append((report.matched, sum(eager.values())))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[END]": 0, "[UNK]": 1} | {f"w{n}": n + 2 for n in range(WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="[END]", pad_token="[END]", unk_token="[UNK]"
    )


def texts(count: int, longest: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    middle = math.log(longest / 5)
    lengths = [min(longest, 3 + int(draw.lognormvariate(middle, 0.7))) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(length)) for length in lengths]


def trainer_of(name: str, smoke: bool, steps: int, folder: str, callbacks: list[Any]) -> Any:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    cached = {"cache_implementation": "static"} if name.endswith(STATIC) else {}
    name = name.removesuffix(STATIC)
    on_gpu, longest = torch.cuda.is_available(), 100 if smoke else 1000
    count = 8 * steps
    sizes = (SMALL if smoke else LAUNCH_BOUND) | {"vocab_size": WORDS + 2}
    of_grpo = OF_SMALL_GRPO if smoke else OF_GRPO
    if name == "grpo":
        sizes |= {"num_hidden_layers": of_grpo["num_hidden_layers"]}
    config = Qwen3MoeConfig(**sizes, experts_implementation="grouped_mm", eos_token_id=0)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    first, second = texts(count, longest, 1), texts(count, longest, 2)
    rows = {
        "sft": {"text": first},
        "dpo": {"prompt": [t[: len(t) // 3] for t in first],
                "chosen": [t[len(t) // 3 :] for t in first], "rejected": second},
        "grpo": {"prompt": first},
    }[name]  # fmt: skip
    kind = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO"}[name]
    given: dict[str, Any] = {"max_steps": steps, "logging_steps": 1}
    if name == "grpo":
        given |= {"max_completion_length": of_grpo["max_completion_length"]} | cached
    options = getattr(trl, f"{kind}Config")(
        folder, use_cpu=not on_gpu, save_strategy="no", report_to="none", **given
    )
    more = {"reward_funcs": _reward} if name == "grpo" else {}
    return getattr(trl, f"{kind}Trainer")(
        model,
        args=options,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        callbacks=callbacks,
        **more,
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("1")) for text in completions]


def measure(
    name: str, contender: str, smoke: bool, steps: int, profiled_step: int | None
) -> dict[str, Any]:
    from moe_graphs.integrations.transformers import GraphCallback

    graphed = GraphCallback() if contender == "GraphCallback" else None
    generates = name.startswith("grpo")
    measured = Measured(graphed, generates, profiled_step)
    callbacks = [measured] if graphed is None else [graphed, measured]
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(name, smoke, steps, folder, callbacks).train()
    seconds = measured.seconds[BEHIND:]
    tokens = [int(each) for each in measured.tokens[BEHIND:]]
    found: dict[str, Any] = {
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "losses": measured.losses,
    }
    if generates:
        found["sizes"] = OF_SMALL_GRPO if smoke else OF_GRPO
        found["generation_ms"] = 1e3 * statistics.median(measured.generation[BEHIND:])
    if torch.cuda.is_available():
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["max_allocated_bytes"] = torch.cuda.max_memory_allocated()
    if graphed is not None:
        (matched, eager), (before, eager_before) = measured.counts[-1], measured.counts[BEHIND - 1]
        found["share"] = (matched - before) / (matched - before + eager - eager_before)
        lengths, report = graphed.accelerated.lengths, graphed.report
        padding = lengths.padding / max(1, lengths.tokens)
        found["lengths"] = {"chosen": lengths.chosen, "padding": padding}
        found["graphs"] = {"matched": report.matched, "eager_calls": report.eager_calls,
                           "shapes": report.shapes, "shapes_left": report.shapes_left,
                           "pool_bytes": report.pool_bytes}  # fmt: skip
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a file of JSON lines to append to")
    parser.add_argument("--commit", help="the commit to stamp, where .git does not say it")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help="by commas")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="by commas")
    parser.add_argument("--steps", type=int, default=80, help=f"of a run; {BEHIND} do not count")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, also on a CPU")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a contender")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profiled-step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(
            json.dumps(measure(*options.one, options.smoke, options.steps, options.profiled_step))
        )
        return 0
    names = options.trainers.split(",")
    if set(names) - set(KNOWN):
        parser.error(f"--trainers: known are {', '.join(KNOWN)}")
    if options.steps <= BEHIND:
        parser.error(f"--steps: more than {BEHIND}, the steps that do not count")
    contenders = options.contenders.split(",")
    if set(contenders) - set(CONTENDERS):
        parser.error(f"--contenders: known are {', '.join(CONTENDERS)}")
    environment, failed = stamp(options.commit), 0
    for name, contender in itertools.product(names, contenders):
        more = ["--steps", str(options.steps), *(["--smoke"] if options.smoke else [])]
        found = in_own_process(__file__, [name, contender, *more], options.timeout)
        line = {"benchmark": "trl_trainers", "trainer": name, "contender": contender,
                "smoke": options.smoke, **found, "environment": environment}  # fmt: skip
        failed += line["error"] is not None
        leave(line, SHOWN, options.out)
    return int(failed > 0)


SHOWN = ("trainer", "contender", "tokens_per_second", "step_ms", "generation_ms", "share",
         "max_allocated_bytes", "lengths", "error")  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
