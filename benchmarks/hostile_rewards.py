"""Hostile reward calls beside well-behaved ones: does the run live, do neighbours keep their pace, is nothing left?

    python benchmarks/hostile_rewards.py [--calls 1000]

One stream of calls misbehaves in ten ways, in turn, on a fence of two workers; another stream of ordinary maths
verifications runs beside it. Throughput of the ordinary ones is compared with a time in which they run alone. The fork
bomb is bounded (64 processes): an endless one would take the machine down if the fence were at fault. Last line:
`calls=… alive=… neighbours_throughput=… left_over=…`; neighbours_throughput is the share of the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "rollout" / "rewards")]

from slime_rl.rollout.rewards.fence import ProcessFence  # noqa: E402

VERIFY = "slime_rl.rollout.rewards.mathematics_fenced:equal_to_any"
HANG_S = 0.2
# name -> (function, arguments, deadline in seconds, how it may end: a failure, or "" for a value)
HOSTILE: dict[str, tuple[str, tuple[object, ...], float, tuple[str, ...]]] = {
    "infinite loop": ("hostile:spin", (), HANG_S, ("timeout",)),
    "endless recursion": ("hostile:deep", (), 10.0, ("error",)),
    "os._exit": ("hostile:leave", (0,), 10.0, ("crash",)),
    "SIGKILL to itself": ("hostile:kill_self", (), 10.0, ("crash",)),
    "SIGKILL to its parent": ("hostile:kill_parent", (), 10.0, ("error",)),
    "4 GiB of memory": ("hostile:allocate", (4 << 30,), 10.0, ("memory",)),
    "bounded fork bomb": ("hostile:fork_bomb", (6,), 10.0, ("processes",)),
    "closes all files": ("hostile:close_files", (), 10.0, ("crash",)),
    "prints 1 GB": ("hostile:print_much", (1 << 30,), 20.0, ("",)),
    "sympy blow-up": (VERIFY, (["5"], "\\boxed{9^{9^{9^{9}}}}"), HANG_S, ("timeout", "memory", "error", "")),
}


async def neighbours(fence: ProcessFence, stop: asyncio.Event) -> float:
    """Ordinary verifications one after another until `stop`; how many a second."""
    started, done = time.monotonic(), 0
    while not stop.is_set():
        answer = await fence.call(VERIFY, ["\\frac{1}{2}"], "\\boxed{0.5}")
        assert answer.value == 1.0, f"an ordinary call failed: {answer}"
        done += 1
    return done / (time.monotonic() - started)


async def undisturbed(fence: ProcessFence, seconds: float) -> float:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    return await neighbours(fence, stop)


async def attack(fence: ProcessFence, calls: int) -> tuple[Counter[str], float]:
    """Hostile calls in turn, beside neighbours; (outcomes that were not expected, neighbours a second)."""
    stop, odd = asyncio.Event(), Counter[str]()
    beside = asyncio.create_task(neighbours(fence, stop))
    kinds = list(HOSTILE.items())
    for i in range(calls):
        name, (function, arguments, seconds, expected) = kinds[i % len(kinds)]
        answer = await fence.call(function, *arguments, timeout_s=seconds)
        if str(answer.failure or "") not in expected:
            odd[f"{name}: {answer.failure or answer.value} {answer.message}"] += 1
    stop.set()
    return odd, await beside


async def measure(calls: int, quiet_s: float) -> int:
    before = set(psutil.Process().children(recursive=True))
    with ProcessFence(2, timeout_s=10.0, memory_bytes=1 << 30) as fence:
        await fence.call_many(VERIFY, [(["1"], "\\boxed{1}")] * 4)  # both workers have imported sympy
        alone = await undisturbed(fence, quiet_s)
        started = time.monotonic()
        odd, beside = await attack(fence, calls)
        seconds = time.monotonic() - started
        alone = (alone + await undisturbed(fence, quiet_s)) / 2  # the machine may have become slower or faster
        alive = (await fence.call("hostile:add", 2, 3)).value == 5
        counts = fence.counts()
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    print(f"{calls} hostile calls in {seconds:.0f} s; neighbours {alone:.0f}/s alone, {beside:.0f}/s beside them")
    print(f"outcomes: {counts}")
    for text, count in odd.items():
        print(f"not expected, {count} times: {text}")
    share = beside / alone
    print(f"calls={calls} alive={alive} neighbours_throughput={share:.2f} left_over={len(left)}")
    return 0 if alive and not left and not odd else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--quiet-s", type=float, default=10.0, help="seconds of neighbours alone, before and after")
    args = parser.parse_args(argv)
    return asyncio.run(measure(args.calls, args.quiet_s))


if __name__ == "__main__":
    sys.exit(main())
