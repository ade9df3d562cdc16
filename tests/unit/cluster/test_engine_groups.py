"""Which engines a run starts from --sglang-config: models, arguments, numbers and places."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from factories import make_config, write_model_folder

from slime_rl.cluster import engines
from slime_rl.config import ClusterConfig, Config


class Handle:
    """What an EngineHandle is made from."""

    def __init__(self, config: Config, placement: Any, index: int, seats: list[Any]) -> None:
        self.config, self.index, self.seats = config, index, seats


class Places:
    """Bundles that are only names."""

    def engine_seats(self, index: int) -> list[Any]:
        return [({"bundle": f"policy {index}"}, (index,))]

    def reserve_engines(self, num_engines: int, cluster: ClusterConfig) -> list[Any]:
        gpus, nodes = tuple(range(cluster.engine_gpus_on_node)), range(cluster.nodes_per_engine)
        return [[({"bundle": f"beside {i}.{node}"}, gpus) for node in nodes] for i in range(num_engines)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(engines, "EngineHandle", Handle)
    judge = write_model_folder(tmp_path / "judge")
    (tmp_path / "engines.yaml").write_text(
        f"""
        sglang:
          - name: policy
            server_groups: [{{num_gpus: 1, overrides: {{log-requests: true}}}}, {{num_gpus: 1}}]
          - name: judge
            model_path: {judge}
            server_groups: [{{num_gpus: 4, num_gpus_per_engine: 2}}]
        """
    )
    return make_config(tmp_path, "--sglang-config", str(tmp_path / "engines.yaml"), "--sglang-log-level", "error")


def test_the_policys_engines_have_the_arguments_of_their_groups(config: Config) -> None:
    group = engines.policy_engines(config, Places())  # type: ignore[arg-type]
    found = [(h.index, h.config.engine.sglang_args, h.seats) for h in group.handles]  # type: ignore[union-attr]
    assert found == [
        (0, ("--log-level", "error", "--log-requests"), [({"bundle": "policy 0"}, (0,))]),
        (1, ("--log-level", "error"), [({"bundle": "policy 1"}, (1,))]),
    ]
    assert not group.guard.keeps_weights and group.router.log_path.name == "router.log"


def test_models_beside_it_have_engines_a_router_and_a_guard_of_their_own(config: Config, tmp_path: Path) -> None:
    policy = engines.policy_engines(config, Places())  # type: ignore[arg-type]
    ((name, group),) = engines.other_engines(config, Places(), policy).items()  # type: ignore[arg-type]
    found = [(h.index, h.config.model.hf_checkpoint, h.seats) for h in group.handles]  # type: ignore[union-attr]
    judge = str(tmp_path / "judge")
    seats = [[({"bundle": f"beside {i}.0"}, (0, 1))] for i in range(2)]
    assert (name, found) == ("judge", [(2, judge, seats[0]), (3, judge, seats[1])])
    assert group.guard.keeps_weights and group.router.log_path.name == "router_judge.log"


def test_models_may_share_the_router(config: Config) -> None:
    shared = config.with_sections(router=dataclasses.replace(config.router, share_router=True))
    policy = engines.policy_engines(shared, Places())  # type: ignore[arg-type]
    ((_, group),) = engines.other_engines(shared, Places(), policy).items()  # type: ignore[arg-type]
    assert group.router is policy.router and policy.router.shared
    seen = []
    for each in (policy, group):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy.router, "add_worker", lambda url, model: seen.append((url, model)))
            each.guard.router.add_worker("u")
    assert seen == [("u", "policy"), ("u", "judge")]


def test_the_policys_engines_have_the_sizes_of_their_groups(config: Config, tmp_path: Path) -> None:
    groups = [{"num_gpus": 2}, {"num_gpus": 2, "num_gpus_per_engine": 2}]
    (tmp_path / "sizes.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": groups}]}))
    made = make_config(tmp_path, "--sglang-config", str(tmp_path / "sizes.yaml"))
    group = engines.policy_engines(made, Places())  # type: ignore[arg-type]
    found = [(h.index, h.config.cluster.rollout_num_gpus_per_engine) for h in group.handles]  # type: ignore[union-attr]
    assert found == [(0, 1), (1, 1), (2, 2)]


def test_large_engines_beside_it_span_nodes(config: Config) -> None:
    cluster = dataclasses.replace(config.cluster, rollout_num_gpus_per_node=1)
    large = config.with_sections(cluster=cluster)
    policy = engines.policy_engines(large, Places())  # type: ignore[arg-type]
    ((_, group),) = engines.other_engines(large, Places(), policy).items()  # type: ignore[arg-type]
    seats = [h.seats for h in group.handles]  # type: ignore[union-attr]
    assert seats == [[({"bundle": f"beside {i}.{node}"}, (0,)) for node in range(2)] for i in range(2)]
