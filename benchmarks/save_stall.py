"""How long a step waits for a checkpoint: written at once, and in the background (--async-save).

    python benchmarks/save_stall.py [--hidden 512] [--layers 8] [--repeat 3] [--rollout-s 2.0]

One real trainer on a random Qwen3 takes steps as a run does: rollout (a pause of --rollout-s, in which the trainer is
idle), train, save. The stall of a save is what the loop waits because of it: the time in `save` and `poll`, and what
a training step takes longer for the copy. Last line: `sync_s=… stall_s=… share=…` (medians).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chaos_save import Buffer
from benchmarks.tiny_models import make_checkpoint
from benchmarks.trainer_cases import make_batch, make_config, only_worker
from slime_rl.cluster.saver import Saver
from slime_rl.cluster.train_actors import TrainActor


class Loop:
    """Steps of one trainer, with the seconds of their parts."""

    def __init__(self, folder: Path, rollout_s: float) -> None:
        self.folder, self.rollout_s, self.step = folder, rollout_s, 0
        config = make_config(folder / "model")
        self.actor = TrainActor(config, 0, 1, None)  # a run's train worker without Ray around it
        self.worker = self.actor.worker = only_worker(config)

    def train(self) -> float:
        """A rollout and a training step; seconds of the latter."""
        self.step += 1
        time.sleep(self.rollout_s)
        start = time.perf_counter()
        self.worker.train(self.step, make_batch(self.step))
        return time.perf_counter() - start

    def saver(self, *flags: str) -> Saver:
        config = make_config(self.folder / "model", "--save", str(self.folder / "checkpoints"), *flags)
        return Saver(config, self.actor, Buffer())


def measure(folder: Path, repeat: int, rollout_s: float) -> tuple[float, float]:
    """(seconds of a save at once, seconds that a save in the background holds the loop up), medians."""
    loop = Loop(folder, rollout_s)
    loop.train()
    plain = statistics.median(loop.train() for _ in range(repeat))
    at_once, stalls = [], []
    for _ in range(repeat):
        saver = loop.saver()
        start = time.perf_counter()
        saver.save(loop.step)
        at_once.append(time.perf_counter() - start)
        loop.train()
    for _ in range(repeat):
        saver = loop.saver("--async-save")
        start = time.perf_counter()
        saver.save(loop.step)
        inside = time.perf_counter() - start
        slower = max(0.0, loop.train() - plain)
        start = time.perf_counter()
        saver.poll()
        inside += time.perf_counter() - start
        stalls.append(inside + slower)
        print(f"step {loop.step}: save and poll {inside:.3f} s, training slower by {slower:.3f} s", flush=True)
        saver.wait()
    loop.worker.shutdown()
    return statistics.median(at_once), statistics.median(stalls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rollout-s", type=float, default=2.0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers}
        make_checkpoint(folder / "model", "qwen3", **shape, head_dim=64, num_attention_heads=8, num_key_value_heads=4)
        sync_s, stall_s = measure(folder, args.repeat, args.rollout_s)
    print(f"sync_s={sync_s:.3f} stall_s={stall_s:.3f} share={stall_s / sync_s:.3f}")


if __name__ == "__main__":
    main()
