"""Speed and memory of the data buffer.

    python benchmarks/buffer.py [--prompts 1000 --samples 8 --tokens 4000 --waiting 1000000 --ledger 100000]

Measures, one after the other: groups admitted and taken per second; a global batch from the buffer to 2 and to 4
data-parallel workers through Ray's object store, against memcpy and against pickled Python lists; take latency and host
memory as ever more groups wait; the time of a checkpoint. Last line:
`admit_groups_s=… transfer_vs_lists=… transfer_vs_memcpy=… checkpoint_s=…`
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from slime_rl.buffer.conformance import make_config
from slime_rl.buffer.contract_scene import CountingSource, fill
from slime_rl.buffer.ledger_buffer import LedgerBuffer
from slime_rl.config import Config
from slime_rl.data.batches import RolloutBatch, split_for_data_parallel
from slime_rl.data.ragged import Ragged
from slime_rl.data.state_files import load_state, save_state
from slime_rl.types import Group


def seconds(action: Callable[[], Any], repeats: int = 3) -> float:
    """Shortest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


def rss_bytes() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise ValueError("no VmRSS in /proc/self/status")


def make_batch(num_prompts: int, group_size: int, tokens: int) -> RolloutBatch:
    """A global batch with responses of `tokens` tokens."""
    n = num_prompts * group_size
    lengths = torch.full((n,), tokens)
    generator = torch.Generator().manual_seed(0)
    total = n * tokens

    def ragged(values: torch.Tensor) -> Ragged:
        return Ragged.from_lengths(values, lengths)

    tensors: dict[str, Any] = {
        "tokens": ragged(torch.randint(0, 150_000, (total,), generator=generator)),
        "prompt_lengths": torch.zeros(n, dtype=torch.int64),
        "loss_mask": ragged(torch.ones(total)),
        "rollout_log_probs": ragged(-torch.rand(total, generator=generator)),
        "weight_versions": ragged(torch.full((total,), 3, dtype=torch.int32)),
        "rewards": torch.rand(n, generator=generator),
        "group_ids": torch.arange(n) // group_size,
        "rollout_ids": torch.arange(n),
        "sample_ids": torch.arange(n),
        "truncated": torch.zeros(n, dtype=torch.bool),
        "update_ids": torch.zeros(n, dtype=torch.int64),
    }
    return RolloutBatch(tensors, None, {"step": 0, "weight_version": 0, "num_samples": n})


@ray.remote
class Worker:
    """A data-parallel worker that gets its shard and answers how many tokens it holds."""

    def receive(self, shard: RolloutBatch) -> int:
        return len(shard.ragged("tokens").values)

    def receive_lists(self, stream: bytes) -> int:
        return sum(len(row) for row in pickle.loads(stream)["tokens"])


def transfer(batch: RolloutBatch, num_workers: int) -> tuple[float, float]:
    """(seconds to have the ready shards at the workers, seconds for the same as pickled lists)."""
    workers: list[Any] = [Worker.remote() for _ in range(num_workers)]
    shards = split_for_data_parallel(batch, num_workers)
    small = split_for_data_parallel(batch[: num_workers * 2], num_workers)
    ray.get([w.receive.remote(ray.put(s)) for w, s in zip(workers, small, strict=True)])  # start the processes

    def send() -> None:
        ray.get([w.receive.remote(ray.put(s)) for w, s in zip(workers, shards, strict=True)])

    lists = [{key: value.to_list() for key, value in s.tensors.items() if isinstance(value, Ragged)} for s in shards]

    def send_lists() -> None:
        ray.get([w.receive_lists.remote(pickle.dumps(part)) for w, part in zip(workers, lists, strict=True)])

    # The first times the object store's memory is new to the system, which a run pays in its first steps only.
    times = seconds(send, repeats=8), seconds(send_lists, repeats=1)
    for worker in workers:
        ray.kill(worker)
    return times


def memcpy_seconds(nbytes: int) -> float:
    source = np.ones(nbytes, dtype=np.uint8)
    target = np.empty_like(source)
    return seconds(lambda: np.copyto(target, source))


def measure_transfer(num_prompts: int, group_size: int, tokens: int) -> tuple[float, float]:
    """(times faster than lists, times slower than one memcpy); the worse one of 2 and 4 workers."""
    batch = make_batch(num_prompts, group_size, tokens)
    copy_s = memcpy_seconds(batch.nbytes)
    split_s = seconds(lambda: split_for_data_parallel(batch, 4), repeats=1)
    size = batch.nbytes / 1e9
    print(f"batch: {size:.2f} GB; memcpy {size / copy_s:.2f} GB/s; split over 4 {split_s:.2f} s")
    vs_lists, vs_memcpy = [], []
    for num_workers in (2, 4):
        ours, lists = transfer(batch, num_workers)
        rate = batch.nbytes / ours / 1e9
        print(f"{num_workers} workers: {ours:.2f} s ({rate:.2f} GB/s), as pickled lists {lists:.2f} s")
        vs_lists.append(lists / ours)
        vs_memcpy.append(ours / copy_s)
    return min(vs_lists), max(vs_memcpy)


def make_buffer(config: Config, num_generated: int, num_tokens: int) -> tuple[LedgerBuffer, float]:
    """(a buffer with that many generated groups, groups admitted per second)."""
    buffer = LedgerBuffer(config, CountingSource())
    admitting = 0.0
    for start in range(0, num_generated, 1000):
        groups = [fill(group, num_tokens) for group in buffer.reserve(min(1000, num_generated - start))]
        started = time.perf_counter()
        for group in groups:
            buffer.admit(group)
        admitting += time.perf_counter() - started
    return buffer, num_generated / admitting


def measure_rates(config: Config) -> float:
    """Groups admitted per second with 8 samples of 1000 tokens."""
    buffer, admitted = make_buffer(config, 2000, 1000)
    taken: list[Group] = []
    step_s = seconds(lambda: taken.extend(buffer.take(len(buffer.ledger.admitted), 128)), repeats=5)
    print(f"admit {admitted:.0f} groups/s, take {128 / step_s:.0f} groups/s (128 groups of 8 samples x 1000 tokens)")
    return admitted


def measure_waiting(config: Config, most: int, budget: int) -> None:
    """Take latency and memory with more and more waiting groups over a small byte budget."""
    for num_groups in (max(most // 100, 1000), max(most // 10, 1000), most):
        before = rss_bytes()
        buffer, admitted = make_buffer(config, num_groups, 4)
        times = []
        for step in range(20):
            started = time.perf_counter()
            buffer.take(step, 32)
            times.append(time.perf_counter() - started)
            buffer.commit(step)
        grown = (rss_bytes() - before) / 1e6
        print(
            f"{num_groups} waiting groups: take(32) {statistics.median(times) * 1e3:.1f} ms, "
            f"payloads {buffer.payloads.memory_bytes / 1e6:.0f} of {budget / 1e6:.0f} MB in memory, "
            f"{buffer.payloads.spilled_bytes / 1e6:.0f} MB spilled, process {grown:+.0f} MB, "
            f"admit {admitted:.0f} groups/s"
        )
        buffer.close()
        del buffer


def measure_checkpoint(config: Config, num_groups: int) -> float:
    """Seconds for the state of a ledger with that many groups on disk: half of them waiting, half dropped."""
    buffer = LedgerBuffer(config, CountingSource())
    groups = buffer.reserve(num_groups)
    for number, group in enumerate(groups):
        if number % 2:
            buffer.requeue(group)
        else:
            buffer.drop(group, "zero_std")
    for group in buffer.reserve(64):
        buffer.admit(fill(group, 1000))
    path = config.run_dir / "buffer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    took = seconds(lambda: save_state(path, buffer.state_dict()))
    resumed = LedgerBuffer(config, CountingSource())
    loading = seconds(lambda: resumed.load_state_dict(load_state(path)), repeats=1)
    size = (path.stat().st_size + path.with_suffix(".safetensors").stat().st_size) / 1e6
    print(f"checkpoint of {num_groups} groups: {took:.2f} s, {size:.1f} MB; load {loading:.2f} s")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--ledger", type=int, default=100_000)
    args = parser.parse_args()
    budget = 256 << 20
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), "--n-samples-per-prompt", "8")
        single = ("--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce_plus_plus")
        tight = make_config(Path(folder), *single, "--buffer-memory-bytes", str(budget))
        admit = measure_rates(config)
        checkpoint_s = measure_checkpoint(config, args.ledger)
        measure_waiting(tight, args.waiting, budget)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=3 << 30)
    vs_lists, vs_memcpy = measure_transfer(args.prompts, args.samples, args.tokens)
    ray.shutdown()
    print(
        f"admit_groups_s={admit:.0f} transfer_vs_lists={vs_lists:.1f} transfer_vs_memcpy={vs_memcpy:.2f} "
        f"checkpoint_s={checkpoint_s:.2f}"
    )


if __name__ == "__main__":
    main()
