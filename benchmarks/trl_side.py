"""TRL's half of end_to_end_vs_trl.py, run by TRL's own environment: GRPO on the same rows; prints seconds of each step.

python benchmarks/trl_side.py MODEL_DIR ROWS.jsonl PROMPTS SAMPLES NEW_TOKENS STEPS LR float32|autocast|bfloat16
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def exact(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [float(text.strip() == answer) for text, answer in zip(texts, label, strict=True)]


class StepClock(TrainerCallback):
    """Wall seconds from the end of one optimizer step to the end of the next, generation included."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.marks.append(time.monotonic())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(time.monotonic())


def main() -> None:
    model, rows, *numbers, kind = sys.argv[1:]
    prompts, samples, new_tokens, steps = map(int, numbers[:4])
    with open(rows) as file:
        lines = [json.loads(line) for line in file]
    data = [{"prompt": [{"role": "user", "content": r["prompt"]}], "label": r["label"]} for r in lines]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=kind == "autocast",
            per_device_train_batch_size=prompts * samples,
            num_generations=samples,
            max_completion_length=new_tokens,
            temperature=1.0,
            learning_rate=float(numbers[4]),
            lr_scheduler_type="constant",
            beta=0.0,
            max_steps=steps,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": torch.bfloat16 if kind == "bfloat16" else torch.float32},
        )
        trainer = GRPOTrainer(
            model=model, reward_funcs=exact, args=config, train_dataset=Dataset.from_list(data), callbacks=[clock]
        )
        trainer.train()
    seconds = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    lengths = [
        line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line
    ]
    print(json.dumps({"seconds": seconds, "lengths": lengths, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
