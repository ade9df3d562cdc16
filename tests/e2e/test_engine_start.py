"""Engines that cannot start say why, soon; and nothing of one that did start survives its owner."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from factories import make_config
from processes import command_lines, running, wait_for
from tiny_checkpoint import write_tiny_checkpoint

from slime_rl.config import Config
from slime_rl.engine import supervise
from slime_rl.engine.arguments import check_sglang_args
from slime_rl.engine.guard import scheduler_answers
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer
from slime_rl.engine.supervise import SGLANG_SHM_PREFIX
from slime_rl.rollout.client import EngineClient

ROOT = Path(__file__).parents[2]

# Starts an engine and a router, shares a tensor with no one in particular, says when it is up, and waits to be killed.
OWNER = """
import sys, time
from pathlib import Path
import torch, torch.multiprocessing
from slime_rl.config import parse_config
from slime_rl.engine.router import RouterProcess
from slime_rl.engine.server import EngineServer
config = parse_config(sys.argv[1:])
router, engine = RouterProcess(config, config.run_dir), EngineServer(config, 0, config.run_dir)
router.start()
print("starting", flush=True)
engine.start()
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.zeros(1024).share_memory_()
print("up", flush=True)
time.sleep(600)
"""


def tiny_config(tmp_path: Path, *flags: str) -> Config:
    model = write_tiny_checkpoint(tmp_path / "tiny")
    lengths = ("--max-prompt-len", "64", "--max-response-len", "64")
    return make_config(tmp_path, "--hf-checkpoint", str(model), *lengths, *flags)


def below(server: EngineServer) -> list[int]:
    return [] if server.supervisor_pid is None else supervise.descendants(server.supervisor_pid)


def test_an_engine_that_is_suspended_while_it_starts_is_given_up(tmp_path: Path) -> None:
    server = EngineServer(tiny_config(tmp_path, "--engine-health-timeout-s", "2"), 0, tmp_path)

    def suspend() -> None:
        wait_for(lambda: below(server))
        os.kill(below(server)[0], signal.SIGSTOP)

    threading.Thread(target=suspend, daemon=True).start()
    with pytest.raises(RuntimeError, match=r"engine 0 was suspended \(SIGSTOP\) while it started"):
        server.start()
    assert not server.is_alive()


def test_a_checkpoint_without_weights_is_one_clear_error(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    (Path(config.model.hf_checkpoint) / "model.safetensors").unlink()
    engine = EngineServer(config, 0, config.run_dir)
    with pytest.raises(RuntimeError) as caught:
        engine.start()
    message = str(caught.value)
    assert "engine 0 ended while it started" in message
    assert str(config.run_dir / "logs" / "engine_0.log") in message
    assert re.search(r"Cannot find any model weights|safetensors", message)
    assert len(message.splitlines()) < 20
    assert not engine.is_alive()


def test_an_engine_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    engine = EngineServer(tiny_config(tmp_path, "--start-timeout-s", "0.5"), 0, tmp_path)
    with pytest.raises(RuntimeError, match=r"was not healthy within --start-timeout-s 0\.5"):
        engine.start()
    assert supervise.descendants(os.getpid()) == [] or not engine.is_alive()


def test_with_an_api_key_only_its_holders_are_served(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-word\n")
    config = tiny_config(tmp_path, "--engine-api-key-file", str(tmp_path / "key"))
    engine, router = EngineServer(config, 0, config.run_dir), RouterProcess(config, config.run_dir)

    async def generate(url: str, headers: dict[str, str]) -> int:
        async with EngineClient(url, max_in_flight=1, timeout_s=60, headers=headers) as client:
            answer = await client.generate([3, 4, 5], {"max_new_tokens": 4, "ignore_eos": True})
            return len(answer.tokens)

    try:
        router.start()
        engine.start()
        router.add_worker(engine.url)
        assert scheduler_answers(engine.url, 60, config.engine.authorization)
        assert not scheduler_answers(engine.url, 60, {})
        for url in (router.url, engine.url):
            assert asyncio.run(generate(url, config.engine.authorization)) == 4
            with pytest.raises(ValueError, match=r"refused the request: HTTP 40[13]"):
                asyncio.run(generate(url, {}))
        assert engine.log_path.stat().st_mode & 0o077 == 0  # SGLang prints its arguments, the key included
        commands = command_lines(os.getpid())
        assert any("launch_engine" in line for line in commands) and any("launch_router" in line for line in commands)
        assert not any("secret-word" in line for line in commands), "every user of the machine could read it"
    finally:
        engine.stop()
        router.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sglang-schedule-polcy", "lpm"), "--sglang-schedule-polcy.*did you mean --sglang-schedule-policy"),
        (("--sglang-schedule-policy", "best"), "SGLang refuses.*argument --schedule-policy: invalid choice: 'best'"),
        (("--sglang-tensor-parallel-size", "2"), "cannot be passed through: use --rollout-num-gpus-per-engine"),
    ],
)
def test_bad_sglang_arguments_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sglang_args(make_config(tmp_path, *flags))


def test_a_router_argument_that_ends_it_is_one_clear_error(tmp_path: Path) -> None:
    router = RouterProcess(make_config(tmp_path, "--router-server-cert-path", "/nowhere"), tmp_path)
    with pytest.raises(RuntimeError, match="the router ended while it started"):
        router.start()


def test_nothing_survives_a_killed_owner(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1", "label": "1"}\n')
    temporary = tmp_path / "t"
    temporary.mkdir()
    command = [sys.executable, "-c", OWNER, "--hf-checkpoint", str(model), "--prompt-data", str(prompts)]
    command += ["--run-dir", str(tmp_path / "run"), "--max-prompt-len", "64", "--max-response-len", "64"]
    owner = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    )
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"starting\n"
        assert owner.stdout.readline() == b"up\n"
        pids = supervise.descendants(owner.pid)
        assert len(pids) >= 6  # two supervisors, router, server, scheduler, detokenizer
        shared = {path for pid in pids for path in supervise.mapped_files(pid) if SGLANG_SHM_PREFIX in path}
        assert shared
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    wait_for(lambda: not running(pids))
    wait_for(lambda: not list(temporary.glob("slime_p_*")))
    wait_for(lambda: not [path for path in shared if os.path.exists(path)])
