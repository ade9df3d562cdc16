"""GPUs of a bundle that Ray has moved to another node, with a Ray that only answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config
from ray.exceptions import GetTimeoutError

from slime_rl.cluster import placement
from slime_rl.cluster.placement import Placement


def options(group: str, bundle: int) -> dict[str, Any]:
    identity = SimpleNamespace(hex=lambda: group)
    strategy = SimpleNamespace(placement_group=SimpleNamespace(id=identity), placement_group_bundle_index=bundle)
    return {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": strategy}


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: dict[int, list[int]] | None) -> tuple[Placement, list]:
    """A Placement whose bundles 0 and 1 had GPUs 2, 5 and 0; `now` is what they have today, None: no place."""
    asked: list[tuple[int, int]] = []

    def ask(chosen: dict[str, Any]) -> Any:
        bundle = chosen["scheduling_strategy"].placement_group_bundle_index
        asked.append((bundle, chosen["num_gpus"]))
        return SimpleNamespace(remote=lambda: bundle)

    def get(bundles: list[int], timeout: float) -> Any:
        if now is None:
            raise GetTimeoutError
        return [("node", now[bundle]) for bundle in bundles]

    ray = SimpleNamespace(remote=lambda function: SimpleNamespace(options=lambda **o: ask(o)), get=get)
    monkeypatch.setattr(placement, "ray", ray)
    made = object.__new__(Placement)
    made.config, made.uses_gpus = make_config(tmp_path, "--start-timeout-s", "7"), True
    made._gpus = {("g", 0): [5, 2], ("g", 1): [0]}
    return made, asked


def test_each_process_takes_its_place_among_the_gpus_of_its_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = make(tmp_path, monkeypatch, {0: [7, 1], 1: [3]})
    wanted = [(options("g", 0), (2,)), (options("g", 0), (5,)), (options("g", 1), (0,)), (options("g", 0), (2, 5))]
    assert made.present_gpus(wanted) == [(1,), (7,), (3,), (1, 7)]
    assert asked == [(0, 2), (1, 1)], "each bundle is asked once, for all of its GPUs"


def test_without_a_place_it_says_how_long_it_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = make(tmp_path, monkeypatch, None)
    with pytest.raises(RuntimeError, match="no place for it within 7 s; has a node been lost"):
        made.present_gpus([(options("g", 0), (2,))])


def test_on_cpu_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = make(tmp_path, monkeypatch, None)
    made.uses_gpus = False
    assert made.present_gpus([(options("g", 0), ())]) == [()] and asked == []
