"""Taking turns with the trainer: what is asked of engines and when, and that memory really goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

from slime_rl.engine.control import EngineError
from slime_rl.weight_sync import memory as memory_module
from slime_rl.weight_sync.instructions import Instruction
from slime_rl.weight_sync.memory import EngineMemory
from slime_rl.weight_sync.receive import load


class RecordingControl:
    """Stands where EngineControl does; `failing` is the call that raises."""

    log: ClassVar[list[tuple[str, ...]]] = []
    failing = ""

    def __init__(self, url: str, timeout_s: float, released: set[str], headers: object) -> None:
        self.url, self.released = url, released

    async def __aenter__(self) -> RecordingControl:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        async def note(*arguments: Any) -> None:
            if name == self.failing:
                raise EngineError(f"{name} failed")
            if name == "release_memory":
                self.released.update(*arguments)
            if name == "resume_memory":
                self.released.difference_update(*arguments)
            self.log.append((name, *map(str, arguments)) if name.endswith("memory") else (name,))

        return note


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    RecordingControl.log, RecordingControl.failing = [], ""
    monkeypatch.setattr(memory_module, "EngineControl", RecordingControl)
    return RecordingControl.log


def test_on_cuda_weights_come_back_before_the_update_and_the_cache_after(log: list[tuple[str, ...]]) -> None:
    memory = EngineMemory(on_cuda=True, released={})
    memory.change("release", ["http://a"])
    assert memory.released == {"http://a": {"kv_cache", "weights"}}
    memory.change("release", ["http://a"])
    memory.change("resume_weights", ["http://a"])
    memory.change("resume_rest", ["http://a"])
    assert memory.released == {} and memory.failed == {}
    assert log == [
        ("pause",),
        ("release_memory", "('kv_cache', 'weights')"),
        ("resume_memory", "('weights',)"),
        ("resume_memory", "('kv_cache',)"),
    ]


def test_on_cpu_our_receiver_is_asked_within_one_open_update(log: list[tuple[str, ...]]) -> None:
    memory = EngineMemory(on_cuda=False, released={})
    memory.change("release", ["http://a"])
    memory.change("resume_weights", ["http://a"])
    memory.change("resume_rest", ["http://a"])
    assert memory.released == {}
    assert [entry[0] for entry in log] == [
        "pause",
        "flush_cache",
        "begin_weight_update",
        "update_by_instruction",
        "update_by_instruction",
        "end_weight_update",
    ]


def test_an_engine_that_fails_is_reported_and_no_longer_counted(log: list[tuple[str, ...]]) -> None:
    RecordingControl.failing = "flush_cache"
    memory = EngineMemory(on_cuda=False, released={"http://b": {"weights"}})
    memory.change("release", ["http://a"])
    assert memory.failed == {"http://a": "flush_cache failed"}
    assert memory.released == {"http://b": {"weights"}}


@pytest.mark.parametrize("hashed", [False, True])
def test_released_parameters_leave_the_process_and_come_back_for_new_weights(hashed: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(8192, 4096)  # 128 MiB
            self.tied = self.body.weight
            self.register_buffer("table", torch.arange(10))
            self.k_scale = torch.nn.Parameter(torch.tensor(0.5))
            setattr(self.k_scale, "_skip_weight_check", True)  # noqa: B010  SGLang's mark of what no update brings

        def load_weights(self, named: Any) -> None:
            for name, tensor in named:
                self.get_parameter(name).data.copy_(tensor)

    def instruct(kind: Any) -> None:
        import base64
        import pickle

        load(model, pickle.loads(base64.b64decode(Instruction(kind=kind).to_payload())))

    model = Model()
    if hashed:  # as SGLang's checksum does; torch resizes such memory no more
        model.body.weight.data.numpy()
    process = psutil.Process()
    before = process.memory_info().rss
    instruct("release")
    released = before - process.memory_info().rss
    assert released > 100 * 2**20, f"only {released} bytes went"
    assert model.get_buffer("table").tolist() == list(range(10))
    assert model.k_scale.item() == 0.5
    instruct("resume")
    model.load_weights([("body.weight", torch.full((4096, 8192), 2.0)), ("body.bias", torch.zeros(4096))])
    assert model.body(torch.ones(1, 8192)).unique().tolist() == [16384.0]


def test_deltas_are_refused_for_engines_that_give_their_weights_back(tmp_path: Path) -> None:
    from factories import make_config

    with pytest.raises(ValueError, match="--weight-sync must be tensor or disk with --colocate"):
        make_config(tmp_path, "--colocate", "--weight-sync", "disk-delta")
