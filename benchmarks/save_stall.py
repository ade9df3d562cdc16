"""How long a step waits for a checkpoint: written at once, and in the background (--async-save).

    python benchmarks/save_stall.py [--hidden 512] [--layers 8] [--repeat 5] [--rollout-s 2.0]

A train group of one worker in a Ray session takes steps on a random Qwen3 as a run does: rollout (a pause of
--rollout-s, in which the trainer is idle), train, save. The stall of a save is what the loop waits because of it: the
time in `save` and `poll`, and what the next training step takes longer. `busy_share` is the same without the pause:
what a trainer that is never idle waits. Last line: `sync_s=… stall_s=… share=… busy_share=…` (medians).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chaos_save import Buffer
from benchmarks.tiny_models import make_checkpoint
from benchmarks.trainer_cases import make_batch, make_config
from slime_rl.cluster.placement import Placement
from slime_rl.cluster.ray_session import ray_session
from slime_rl.cluster.saver import Saver
from slime_rl.cluster.train_group import StepBatch, TrainGroup


class Loop:
    """Steps of a train group, with the seconds of their parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.config = folder, 0, make_config(folder / "model")
        self.group = TrainGroup(self.config, Placement(self.config).train, 1)
        self.group.connect(ray.get(self.group.start()))

    def train(self, rollout_s: float) -> float:
        """A rollout and a training step; seconds of the latter."""
        self.step += 1
        batch = StepBatch(policy=[ray.put(make_batch(self.step))], critic=[])
        time.sleep(rollout_s)
        start = time.perf_counter()
        self.group.train(self.step, batch)
        return time.perf_counter() - start

    def saver(self, *flags: str) -> Saver:
        config = make_config(self.folder / "model", "--save", str(self.folder / "checkpoints"), *flags)
        return Saver(config, self.group, Buffer())

    def at_once(self) -> float:
        """Seconds of a save that is written before the next step."""
        saver = self.saver()
        start = time.perf_counter()
        saver.save(self.step)
        saver.publish()
        return time.perf_counter() - start

    def stall(self, rollout_s: float) -> float:
        """Seconds that the loop waits because of a save in the background."""
        plain = self.train(rollout_s)
        saver = self.saver("--async-save")
        start = time.perf_counter()
        saver.save(self.step)
        saver.publish()
        inside = time.perf_counter() - start
        slower = max(0.0, self.train(rollout_s) - plain)
        start = time.perf_counter()
        saver.poll()
        inside += time.perf_counter() - start
        print(f"rollout {rollout_s} s: save and poll {inside:.3f} s, training slower by {slower:.3f} s", flush=True)
        saver.wait()
        return inside + slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rollout-s", type=float, default=2.0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers}
        make_checkpoint(folder / "model", "qwen3", **shape, head_dim=64, num_attention_heads=8, num_key_value_heads=4)
        with ray_session(make_config(folder / "model")):
            loop = Loop(folder)
            loop.train(0.0)
            sync_s = statistics.median(loop.at_once() for _ in range(args.repeat))
            stall_s, busy_s = (
                statistics.median(loop.stall(pause) for _ in range(args.repeat)) for pause in (args.rollout_s, 0.0)
            )
    print(f"sync_s={sync_s:.3f} stall_s={stall_s:.3f} share={stall_s / sync_s:.3f} busy_share={busy_s / sync_s:.3f}")


if __name__ == "__main__":
    main()
