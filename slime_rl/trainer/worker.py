"""The worker that trains the policy: a plain class, one per process, that the cluster wraps.

    TrainWorker(config, rank, …)
        device, threads, stand-ins ─► process groups ─► model from config.json ─► weights ─► DDP, optimizer, schedule
    .train(step, batch)            .compute_log_probs(batch, which)      .compute_values(batch)
    .export_weights()              .save_hf(path)
    .save(path, step, extra)       .load(path)
    .offload() / .onload()

It has PPO's critic, too, unless `--critic-num-workers` gives that workers of its own (critic_worker.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from slime_rl.config import Config
from slime_rl.observability.trace import open_trace
from slime_rl.trainer.member import CRITIC_FOLDER, REFERENCE_FOLDER, GroupMember

if TYPE_CHECKING:
    from slime_rl.data.batches import RolloutBatch, TokenFields
    from slime_rl.trainer.state import TrainState
    from slime_rl.trainer.token_log import TokenLog


class TrainWorker(GroupMember):
    """One rank of the policy's train group. Every method is collective, but for what says something else."""

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        local_rank: int = 0,
    ) -> None:
        """Join the group at master_addr:master_port and build the model with the weights of --hf-checkpoint.

        Raises:
            ValueError: flags, parallel sizes or a checkpoint that do not fit.
        """
        super().__init__(config, config.parallel, rank, world_size, (master_addr, master_port), local_rank)
        from slime_rl.trainer.setup import build_critic, build_state

        self.critic: TrainState | None = None
        with self._leaving_on_error():
            self.state, self.conversion = build_state(config, self.layout, self.device)
            self.states[""] = self.state
            if config.needs_critic and not config.critic_is_apart:
                self.critic = self.states[CRITIC_FOLDER] = build_critic(config, self.layout, self.device)
        self.state.trace = open_trace(config, f"trainer_{rank}")

    def train(self, step: int, batch: RolloutBatch, given: Sequence[TokenFields] = ()) -> dict[str, float]:
        """Train on this data-parallel rank's share of a step's batch; metrics over the world, the same on every rank.

        `given` is for a critic apart: its values of all samples, and what `compute_token_fields` gave on all ranks.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; names step, micro-batch and samples.
            ValueError: a batch that does not fit.
        """
        from slime_rl.trainer.step import train_step

        self.wait_until_copied()
        with self.state.trace.span("steps", f"step {step}"):
            metrics = train_step(self.state, step, batch, self.critic, given)
        self.state.trace.flush()
        return metrics

    def token_log(self) -> TokenLog:
        """What the last step saw of this worker's samples of --log-samples, by `sample_ids`. Not collective."""
        return self.state.token_log

    def compute_token_fields(self, batch: RolloutBatch) -> TokenFields:
        """The log-probs that a step needs before its first update, as another group of workers can take them."""
        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.timing import PhaseTimer
        from slime_rl.trainer.token_fields import current_kl_coef, pack_fields, policy_fields

        self.wait_until_copied()  # the reference takes the place of the weights that a save is copying
        timer = PhaseTimer(self.device, self.state.trace)
        fields = policy_fields(self.state, make_shard(self.state, batch), timer)
        return pack_fields(batch, fields, timer, current_kl_coef(self.state))

    def compute_log_probs(self, batch: RolloutBatch, which: Literal["policy", "reference"] = "policy") -> Tensor:
        """Log-probs `[t]` float32 of the response tokens, in the order of the batch's samples, on the CPU.

        Raises:
            ValueError: the reference was asked for and the run has none.
        """
        from contextlib import nullcontext

        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.token_pass import token_pass

        reference = self.state.reference
        if which == "reference" and reference is None:
            raise ValueError("there is no reference model: neither --use-kl-loss nor --kl-coef asks for one")
        self.wait_until_copied()
        shard = make_shard(self.state, batch)
        weights = nullcontext()
        if which == "reference" and reference is not None:
            weights = reference.swapped_into(self.state.models)
        with weights:
            return token_pass(self.state, shard).cpu()

    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """The critic's values `[t]` float32 of the response tokens, as `compute_log_probs` orders them.

        Raises:
            ValueError: the run has no critic here.
        """
        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.token_pass import token_pass

        if self.critic is None:
            raise ValueError("there is no critic: only --advantage-estimator gae has one")
        return token_pass(self.critic, make_shard(self.critic, batch)).cpu()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on the worker's device), one at a time, in the same order on every rank.

        A tensor may share memory with the model: read it before the next `train`.
        """
        yield from self.conversion.export_weights(self.state.models)

    def save_hf(self, path: str | Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer, chat template) that transformers and SGLang load."""
        from slime_rl.trainer.hf_export import save_hf

        kept = self.conversion.kept_weights(self.config.model.hf_checkpoint) if self.rank == 0 else ()
        save_hf(chain(self.export_weights(), kept), Path(path), self.config, is_writer=self.rank == 0)

    def save(self, path: str | Path, step: int, extra: dict[str, Any]) -> None:
        self._save_reference(Path(path))
        super().save(path, step, self._with_own_extra(extra))

    def begin_save(self, path: str | Path, step: int, extra: dict[str, Any]) -> None:
        self._save_reference(Path(path))
        super().begin_save(path, step, self._with_own_extra(extra))

    def _with_own_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        control = self.state.adaptive_kl
        return extra if control is None else {**extra, "kl_coef": control.coef}

    def _save_reference(self, path: Path) -> None:
        """Where the reference follows the policy it is in no other place than here."""
        from slime_rl.trainer.checkpoint import save_reference

        if self.config.model.ref_update_interval is not None:
            save_reference(self.state, path / REFERENCE_FOLDER)

    def load(self, path: str | Path) -> dict[str, Any]:
        from slime_rl.trainer.checkpoint import load_reference

        loaded = super().load(path)
        if self.config.model.ref_update_interval is not None and (Path(path) / REFERENCE_FOLDER).is_dir():
            load_reference(self.state, Path(path) / REFERENCE_FOLDER)
        if self.state.adaptive_kl is not None and "kl_coef" in loaded["extra"]:
            self.state.adaptive_kl.coef = loaded["extra"]["kl_coef"]
        return loaded

    def load_weights(self, path: str | Path) -> None:
        """Take only the weights of a folder that `save` or a conversion wrote, on any parallel layout.

        Raises:
            ValueError: the folder holds no checkpoint, or one of another model.
        """
        from slime_rl.trainer.checkpoint import load_weights

        load_weights(self.state, Path(path))
