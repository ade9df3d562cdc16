"""What watching for faults costs: CPU time of health checks of engine, router and trainer, as a share of the cores.

    python benchmarks/fault_cost.py [--seconds 20] [--data DIR]

A real engine and a real router are watched by the guard of a run, nothing else at work, once with checks every 0.2 s
and once with hardly any; the CPU time of all their processes and of this one is compared: what a check costs follows.
A trainer's pulse is felt as often as it takes to measure it. Last line: `check_cpu_ms=… pulse_cpu_ms=… share=…`: of an
engine's and the router's check together, of a pulse, and the share of all cores that they take at the default intervals
with one engine and one trainer. A step can be longer by no more than that.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_rl.cluster.pulse import start_pulse
from slime_rl.cluster.train_calls import _FEEL_PULSE_S
from slime_rl.config import Config, EngineConfig, parse_config
from slime_rl.engine.guard import EngineGuard, scheduler_answers
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer
from tools.make_quickstart import main as make_quickstart

OFTEN_S, SELDOM_S = 0.2, 1000.0
PULSES = 500


@dataclass
class Watched:
    """The engine as its guard sees it."""

    server: EngineServer

    def end_message(self) -> str | None:
        return self.server.end_message()

    def restart(self) -> str:
        raise RuntimeError("nothing may fail here")

    def weight_version(self) -> int | None:
        return None


def make_config(data: Path, run_dir: Path, interval_s: float) -> Config:
    return parse_config(
        [
            *("--hf-checkpoint", str(data / "model"), "--prompt-data", str(data / "train.jsonl"), "--rm-type", "exact"),
            *("--rollout-num-engines", "1", "--run-dir", str(run_dir), "--device", "cpu"),
            *("--max-prompt-len", "64", "--max-response-len", "16"),
            *("--engine-health-interval-s", str(interval_s)),
        ]
    )


def cpu_seconds() -> float:
    """Of this process and all below it."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [own, *own.children(recursive=True)])


def watched_for(config: Config, router: RouterProcess, server: EngineServer, seconds: float) -> tuple[float, int]:
    """(CPU seconds, checks of the engine) while a guard watches."""
    checks = 0

    def probe(url: str, timeout_s: float) -> bool:
        nonlocal checks
        checks += 1
        return scheduler_answers(url, timeout_s, {})

    guard = EngineGuard(config, router, probe)
    guard.begin([(Watched(server), server.url)])
    time.sleep(1.0)
    before, checks = cpu_seconds(), 0
    time.sleep(seconds)
    used, counted = cpu_seconds() - before, checks
    guard.close()
    guard.check()
    router.remove_worker(server.url)
    return used, counted


def pulse_ms() -> float:
    """CPU milliseconds of both sides of one pulse."""
    pulse = start_pulse("127.0.0.1", "node")
    begin = time.process_time()
    assert all(pulse.beats(5.0) for _ in range(PULSES))
    return 1e3 * (time.process_time() - begin) / PULSES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--data", type=Path, help="what tools/make_quickstart.py has made; otherwise it is made now")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder) / "data"
        if args.data is None:
            make_quickstart(["--output", str(data)])
        often, seldom = (make_config(data, Path(folder) / "run", interval) for interval in (OFTEN_S, SELDOM_S))
        server, router = EngineServer(often, 0, often.run_dir), RouterProcess(often, often.run_dir)
        try:
            router.start()
            server.start()
            idle_s, _ = watched_for(seldom, router, server, args.seconds)
            busy_s, checks = watched_for(often, router, server, args.seconds)
        finally:
            server.stop()
            router.stop()
    check_s, pulse_s = max(0.0, busy_s - idle_s) / checks, pulse_ms() / 1e3
    default_s = EngineConfig().engine_health_interval_s
    share = (check_s / default_s + pulse_s / _FEEL_PULSE_S) / (os.cpu_count() or 1)
    print(f"{checks} checks in {args.seconds:g} s: {busy_s:.2f} CPU seconds, {idle_s:.2f} without them")
    print(f"check_cpu_ms={1e3 * check_s:.2f} pulse_cpu_ms={1e3 * pulse_s:.2f} share={share:.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
