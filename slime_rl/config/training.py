from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from slime_rl.config.checks import check, check_not_negative, check_positive
from slime_rl.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training: steps, batch sizes and their arithmetic.

    A rollout of `rollout_batch_size` prompts with `n_samples_per_prompt` samples each is trained on in
    `num_updates_per_rollout` optimizer updates, `num_epochs_per_rollout` times over.
    """

    num_steps: int = flag(100, aliases=("--num-rollout",))
    """Rollouts to train on; 0 only evaluates."""

    loss: Literal["policy", "sft"] = "policy"
    """policy trains by reward; sft trains on the label as the response."""

    rollout_batch_size: int = 32
    """Prompts in one step."""

    n_samples_per_prompt: int = 8
    """Samples generated for each prompt; they form one group."""

    num_updates_per_rollout: int = flag(1, aliases=("--num-steps-per-rollout",))
    """Optimizer updates that one pass over a step's samples is split into."""

    num_epochs_per_rollout: int = 1
    """Passes over a step's samples."""

    global_batch_size: int | None = None
    """Samples in one optimizer update. Follows from the three sizes above; when given, it must agree with them."""

    max_tokens_per_worker: int = flag(8192, aliases=("--max-tokens-per-gpu",))
    """Most tokens in one packed micro-batch; a single longer sample is alone in its own."""

    micro_batch_size: int | None = None
    """Fixed number of samples in a micro-batch instead of --max-tokens-per-worker."""

    share_prompts: bool = True
    """Compute a prompt once for all samples of it in a micro-batch; the same up to rounding. Only where attention is
    our own (no Transformer Engine), without context parallelism, MLA and router losses."""

    seed: int = 1234
    """Seed of data order, sampling and weights that are made anew."""

    deterministic: bool = False
    """Two runs with the same flags are equal bit for bit: a seed for every sample, fixed order and shapes. For
    synchronous runs (or --max-staleness 0); slower, on CPU by far."""

    stop_at_eval_accuracy: float | None = None
    """End the run (with its last checkpoint and export) when the mean reward of the first evaluation set gets here."""

    def __post_init__(self) -> None:
        check_not_negative(num_steps=self.num_steps)
        target = self.stop_at_eval_accuracy
        check(target is None or math.isfinite(target), "--stop-at-eval-accuracy", "must be finite", target)
        # The generators of numpy and SGLang take 32 bits, and every engine adds its number.
        check(0 <= self.seed < 2**31, "--seed", "must be in [0, 2147483647]", self.seed)
        check_positive(
            rollout_batch_size=self.rollout_batch_size,
            n_samples_per_prompt=self.n_samples_per_prompt,
            num_updates_per_rollout=self.num_updates_per_rollout,
            num_epochs_per_rollout=self.num_epochs_per_rollout,
            max_tokens_per_worker=self.max_tokens_per_worker,
            micro_batch_size=self.micro_batch_size,
        )
        check(
            self.loss == "policy" or self.n_samples_per_prompt == 1,
            "--n-samples-per-prompt",
            "must be 1 with --loss sft (each row has one label)",
            self.n_samples_per_prompt,
        )
        updates, samples = self.num_updates_per_rollout, self.samples_per_rollout
        check(
            samples % updates == 0,
            "--num-updates-per-rollout",
            f"must divide --rollout-batch-size x --n-samples-per-prompt = {samples}",
            updates,
        )
        if self.global_batch_size is not None:
            check(
                self.global_batch_size * updates == samples,
                "--global-batch-size",
                f"x --num-updates-per-rollout ({updates}) must equal --rollout-batch-size x --n-samples-per-prompt "
                f"({self.rollout_batch_size} x {self.n_samples_per_prompt} = {samples})",
                self.global_batch_size,
            )

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.samples_per_rollout // self.num_updates_per_rollout


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer: AdamW and its learning-rate schedule, counted in optimizer updates."""

    lr: float = 1e-6
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate that the schedule ends at."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the schedule after the warm-up; WSD (warm-up, stable, decay) keeps the rate until its last updates."""

    lr_warmup_updates: int = flag(0, aliases=("--lr-warmup-iters",))
    """Updates over which the rate rises from 0."""

    lr_decay_updates: int | None = flag(None, aliases=("--lr-decay-iters",))
    """Updates that the schedule spans; the whole run when not given."""

    lr_wsd_decay_updates: int | None = flag(None, aliases=("--lr-wsd-decay-iters",))
    """Updates at the schedule's end over which WSD decays."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""

    weight_decay: float = 0.0
    """Decoupled weight decay; never on norms and biases."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""

    adam_beta2: float = 0.98
    """Decay of the second moment."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        check_not_negative(
            lr=self.lr,
            min_lr=self.min_lr,
            lr_warmup_updates=self.lr_warmup_updates,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )
        check_positive(adam_eps=self.adam_eps, lr_decay_updates=self.lr_decay_updates)
        check(self.min_lr <= self.lr, "--min-lr", f"must be <= --lr ({self.lr})", self.min_lr)
        for name, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            check(0 <= beta < 1, name, "must be in [0, 1)", beta)
