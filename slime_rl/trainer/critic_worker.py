"""The worker of a critic that has a train group of its own: a plain class, one per process, that the cluster wraps.

.compute_values(batch) ─► values of this worker's samples ──► the policy's workers, and back to .train
.train(step, batch, given) ─► updates of the critic, while the policy's workers make theirs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_rl.config import Config
from slime_rl.observability.trace import open_trace
from slime_rl.trainer.member import CRITIC_FOLDER, GroupMember

if TYPE_CHECKING:
    from slime_rl.data.batches import RolloutBatch, TokenFields


class CriticWorker(GroupMember):
    """One rank of the critic's train group. Every method is collective, but for what says something else."""

    def __init__(
        self, config: Config, rank: int, world_size: int, master_addr: str, master_port: int, local_rank: int = 0
    ) -> None:
        """Join the group at master_addr:master_port and build the critic from --critic-load.

        Raises:
            ValueError: flags, parallel sizes or a checkpoint that do not fit.
        """
        super().__init__(config, config.critic_parallel, rank, world_size, (master_addr, master_port), local_rank)
        from slime_rl.trainer.setup import build_critic

        with self._leaving_on_error():
            self.critic = self.states[CRITIC_FOLDER] = build_critic(config, self.layout, self.device)
        self.critic.trace = open_trace(config, f"critic_{rank}")

    def compute_values(self, batch: RolloutBatch) -> TokenFields:
        """`values` of this data-parallel rank's share of a batch."""
        from slime_rl.trainer.shard import make_shard
        from slime_rl.trainer.timing import PhaseTimer
        from slime_rl.trainer.token_fields import pack_fields
        from slime_rl.trainer.token_pass import token_pass

        timer, shard = PhaseTimer(self.device, self.critic.trace), make_shard(self.critic, batch)
        with timer.phase("values"):
            values = token_pass(self.critic, shard)
        return pack_fields(batch, {"values": values}, timer, self.config.algorithm.kl_coef)

    def train(self, step: int, batch: RolloutBatch, given: Sequence[TokenFields]) -> dict[str, float]:
        """Train on this data-parallel rank's share of a step's batch; metrics, the same on every rank.

        `given` are the values of all samples from before the step and, with --kl-coef, the policy's log-probs.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; names step, micro-batch and samples.
            ValueError: a batch that does not fit.
        """
        from slime_rl.trainer.critic import critic_step

        self.wait_until_copied()
        with self.critic.trace.span("steps", f"step {step}"):
            metrics = critic_step(self.config, self.critic, step, batch, given)
        self.critic.trace.flush()
        return metrics
