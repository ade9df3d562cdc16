"""Placement on clusters of 1, 2, 8 and 64 nodes, whose Ray gives bundles to nodes and GPUs to bundles in any order."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_config, write_model_folder

from slime_rl.cluster import placement
from slime_rl.cluster.placement import EngineSeat, Placement
from slime_rl.cluster.ray_session import num_places


@dataclass
class Group:
    """A placement group: where each bundle is."""

    number: int
    nodes: list[str]
    gpus: list[list[int]]
    given: bool = True

    @property
    def id(self) -> Any:
        return SimpleNamespace(hex=lambda: str(self.number))

    def wait(self, timeout_s: float) -> bool:
        return self.given


@dataclass
class FakeRay:
    """What `Placement` asks of Ray. A node is (CPUs, GPUs); machines have an address of their own."""

    nodes_of: dict[str, tuple[int, int]]
    seed: int = 0
    groups: list[Group] = field(default_factory=list)
    util: Any = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.free = {name: (cpus, list(range(gpus))) for name, (cpus, gpus) in self.nodes_of.items()}
        self.util = SimpleNamespace(
            placement_group_table=lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))}
        )

    def make_group(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        """Like PACK takes the fullest node that fits; nodes that are alike, bundles and GPUs come in any order."""
        group = Group(len(self.groups), [""] * len(bundles), [[]] * len(bundles))
        self.groups.append(group)
        names, order = list(self.free), list(range(len(bundles)))
        self.random.shuffle(names)
        self.random.shuffle(order)
        used: set[str] = set()
        for bundle in order:
            cpus, gpus = int(bundles[bundle]["CPU"]), int(bundles[bundle].get("GPU", 0))
            fits = [n for n in names if self.free[n][0] >= cpus and len(self.free[n][1]) >= gpus]
            fits = [n for n in fits if strategy == "PACK" or n not in used]
            if not fits:
                group.given = False
                return group
            name = min(fits, key=lambda node: len(self.free[node][1]))
            used.add(name)
            left, ids = self.free[name]
            chosen = self.random.sample(ids, gpus)
            self.free[name] = (left - cpus, [i for i in ids if i not in chosen])
            group.nodes[bundle], group.gpus[bundle] = name, chosen
        return group

    def move(self) -> None:
        """Every bundle goes where another one was, as after the loss of nodes."""
        for group in self.groups:
            places = list(zip(group.nodes, group.gpus, strict=True))
            self.random.shuffle(places)
            group.nodes, group.gpus = [node for node, _ in places], [gpus for _, gpus in places]

    def cluster_resources(self) -> dict[str, float]:
        found = Counter()
        for cpus, gpus in self.nodes_of.values():
            found.update(CPU=cpus, GPU=gpus)
        return dict(found)

    def available_resources(self) -> dict[str, float]:
        return {}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Alive": True,
                "NodeID": name,
                "NodeManagerAddress": f"10.{name}",
                "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})},
            }
            for name, (cpus, gpus) in self.nodes_of.items()
        ]

    def remote(self, function: Callable[[], Any]) -> Any:
        def options(*, scheduling_strategy: Any, **_: Any) -> Any:
            group, bundle = scheduling_strategy.placement_group, scheduling_strategy.placement_group_bundle_index
            return SimpleNamespace(remote=lambda: (group.nodes[bundle], group.gpus[bundle]))

        return SimpleNamespace(options=options)

    def get(self, found: list[Any], timeout: float) -> list[Any]:
        return found


Make = Callable[..., tuple[Placement, FakeRay]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Placement of flags on a cluster of nodes, each (CPUs, GPUs)."""

    def build(nodes: list[tuple[int, int]], *flags: str, seed: int = 0, device: str = "cuda") -> Any:
        ray = FakeRay({f"node{i:02d}": node for i, node in enumerate(nodes)}, seed)
        monkeypatch.setattr(placement, "ray", ray)
        monkeypatch.setattr(placement, "placement_group", ray.make_group)
        monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", SimpleNamespace)
        batch = ("--rollout-batch-size", "64", "--n-samples-per-prompt", "16", "--device", device)
        return Placement(make_config(tmp_path, *batch, *flags)), ray

    return build


def seat_devices(ray: FakeRay, seats: list[EngineSeat]) -> list[tuple[str, int]]:
    """(node, GPU) of the parts of an engine; each part's GPUs are those of its own bundle."""
    found = []
    for options, gpus in seats:
        strategy = options["scheduling_strategy"]
        group, bundle = strategy.placement_group, strategy.placement_group_bundle_index
        assert set(gpus) <= set(group.gpus[bundle]), "Ray may move this bundle without the others"
        assert list(gpus) == sorted(gpus)
        found += [(group.nodes[bundle], gpu) for gpu in gpus]
    return found


def check(made: Placement, ray: FakeRay, others: list[list[EngineSeat]] | None = None) -> None:
    """Nobody shares a GPU but engines and trainer with --colocate; after a move everybody finds its own again."""
    cluster = made.config.cluster
    workers = [(slot.node, slot.gpu) for slot in made.train.slots]
    engines = [made.engine_seats(index) for index in range(cluster.rollout_num_engines)] + (others or [])
    own = [seat_devices(ray, seats) for seats in engines]
    of_policy = [device for devices in own[: cluster.rollout_num_engines] for device in devices]
    groups = made.config.served_models[0].groups
    sizes = [group.num_gpus_per_engine for group in groups for _ in range(group.num_engines)]
    assert [len(devices) for devices in own[: cluster.rollout_num_engines]] == sizes
    taken = [device for devices in own for device in devices]
    assert len(set(workers)) == len(workers) and len(set(taken)) == len(taken)
    assert set(workers) & set(taken) == (set(of_policy) if cluster.colocate else set())
    nodes = [node for node, _ in workers]
    assert len(set(nodes)) == sum(a != b for a, b in zip([None, *nodes], nodes, strict=False)), "a node comes twice"
    ray.move()
    seats = [seat for engine in engines for seat in engine]
    present = made.present_gpus(seats)
    moved = seat_devices(ray, [(options, gpus) for (options, _), gpus in zip(seats, present, strict=True)])
    assert len(set(moved)) == len(taken)
    assert len(set(made.train.present_gpus())) <= 8


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_workers_and_engines_on_the_gpus_of_nodes(make: Make, num_nodes: int, size: int) -> None:
    half = num_nodes * 8 // 2
    flags = ["--train-num-workers", str(half), "--rollout-num-gpus-per-engine", str(size), "--weight-sync", "disk"]
    if num_nodes == 1 and size == 8:
        flags[1] = "8"
        made, ray = make([(40, 16)], *flags)
    else:
        made, ray = make([(40, 8)] * num_nodes, *flags, "--rollout-num-gpus", str(half // size * size), seed=size)
    check(made, ray)


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("by_node", [True, False])
def test_colocated_engines(make: Make, num_nodes: int, size: int, by_node: bool) -> None:
    flags = ["--colocate", "--weight-sync", "disk", "--rollout-num-gpus-per-engine", str(size)]
    flags += ["--rollout-num-gpus", str(num_nodes * 8)]
    if by_node:
        flags += ["--num-nodes", str(num_nodes), "--num-workers-per-node", "8"]
    else:
        flags += ["--train-num-workers", str(num_nodes * 8)]
    check(*make([(40, 8)] * num_nodes, *flags, seed=num_nodes))


@pytest.mark.parametrize(("num_nodes", "engine_nodes"), [(2, 2), (8, 2), (8, 4), (64, 16)])
def test_engines_over_nodes(make: Make, num_nodes: int, engine_nodes: int) -> None:
    flags = ["--rollout-num-gpus-per-engine", str(8 * engine_nodes), "--rollout-num-gpus-per-node", "8"]
    flags += ["--rollout-num-gpus", str(8 * num_nodes), "--weight-sync", "disk"]
    made, ray = make([(40, 8)] * num_nodes + [(8, 1)], *flags, "--train-num-workers", "1")
    check(made, ray)
    assert all(len({part.node for part in parts}) == engine_nodes for parts in made.places)
    check(*make([(40, 8)] * num_nodes, *flags, "--train-num-workers", str(8 * num_nodes), "--colocate"))


@pytest.mark.parametrize("num_nodes", [2, 8, 64])
def test_groups_that_differ_and_a_judge_over_nodes(make: Make, tmp_path: Path, num_nodes: int) -> None:
    judge = write_model_folder(tmp_path / "judge")
    sizes = {"num_gpus": 8 * num_nodes, "num_gpus_per_engine": 16}
    models = [
        {"name": "p", "server_groups": [{"num_gpus": num_nodes}, {"num_gpus": 3, "overrides": {"page-size": 1}}]},
        {"name": "judge", "model_path": str(judge), "server_groups": [sizes, {"num_gpus": 2}]},
    ]
    (tmp_path / "engines.yaml").write_text(json.dumps({"sglang": models}))
    flags = ["--sglang-config", str(tmp_path / "engines.yaml"), "--rollout-num-gpus-per-node", "8"]
    nodes = [(40, 8)] * num_nodes + [(20, 4), (16, 3), (70, 3 + num_nodes)]
    made, ray = make(nodes, *flags, "--weight-sync", "disk", "--train-num-workers", "3")
    _, model = made.config.served_models
    others = []
    for group in model.groups:
        others += made.reserve_engines(group.num_engines, made.config.for_engine(model, group).cluster)
    assert [sum(len(gpus) for _, gpus in seats) for seats in others] == [16] * (num_nodes // 2) + [1, 1]
    check(made, ray, others)


def sizes_file(tmp_path: Path, *groups: tuple[int, int]) -> str:
    """--sglang-config with groups of (number of engines, GPUs of each)."""
    own = [{"num_gpus": count * size, "num_gpus_per_engine": size} for count, size in groups]
    (tmp_path / "sizes.yaml").write_text(json.dumps({"sglang": [{"name": "p", "server_groups": own}]}))
    return str(tmp_path / "sizes.yaml")


@pytest.mark.parametrize("num_nodes", [1, 2, 8, 64])
@pytest.mark.parametrize("colocate", [True, False])
def test_engines_of_several_sizes(make: Make, tmp_path: Path, num_nodes: int, colocate: bool) -> None:
    groups = [(num_nodes, 1), (num_nodes, 4), (num_nodes, 1), (num_nodes, 2)]  # a node's GPUs each
    flags = ["--sglang-config", sizes_file(tmp_path, *groups), "--weight-sync", "disk"]
    flags += ["--train-num-workers", str(8 * num_nodes if colocate else 4)]
    made, ray = make([(40, 8)] * num_nodes + [(8, 4)], *flags, *["--colocate"] * colocate, seed=num_nodes)
    check(made, ray)
    assert len(ray.groups) == (1 if colocate else 4), "a placement group for each size"


def test_an_engine_over_nodes_beside_small_ones(make: Make, tmp_path: Path) -> None:
    flags = ["--sglang-config", sizes_file(tmp_path, (4, 2), (1, 16)), "--rollout-num-gpus-per-node", "8"]
    for nodes, more in (
        ([(40, 8)] * 3 + [(8, 1)], ["--train-num-workers", "1"]),
        ([(40, 8)] * 3, ["--colocate", "--train-num-workers", "24"]),
    ):
        made, ray = make(nodes, *flags, "--weight-sync", "disk", *more)
        check(made, ray)
        assert [len(parts) for parts in made.places] == [1, 1, 1, 1, 2]


def test_a_private_ray_has_a_place_for_engines_of_every_size(make: Make, tmp_path: Path) -> None:
    flags = ("--sglang-config", sizes_file(tmp_path, (3, 1), (2, 4)))
    made, _ = make([(1000, 0)], *flags, device="cpu")
    assert num_places(made.config) == 1 + 3 + 8 + 2
    again, ray = make([(num_places(made.config), 0)], *flags, device="cpu")
    assert ray.free["node00"][0] == 2 and len(again.places) == 5


@pytest.mark.parametrize(
    "flags",
    [
        ("--rollout-num-gpus-per-engine", "4"),
        ("--rollout-num-engines", "3", "--rollout-num-gpus-per-engine", "4", "--train-num-workers", "2"),
        ("--colocate", "--train-num-workers", "8", "--rollout-num-engines", "2", "--rollout-num-gpus-per-engine", "4"),
        ("--critic-num-workers", "5", "--advantage-estimator", "gae", "--train-num-workers", "3"),
        ("--rollout-num-gpus-per-engine", "4", "--rollout-num-gpus-per-node", "2", "--weight-sync", "disk"),
    ],
)
def test_a_private_ray_has_a_place_for_everything_that_is_reserved(make: Make, flags: tuple[str, ...]) -> None:
    made, ray = make([(1000, 0)], *flags, device="cpu")
    ray.nodes_of = {"node00": (num_places(made.config), 0)}
    again, ray = make([(num_places(made.config), 0)], *flags, device="cpu")
    left, _ = ray.free["node00"]
    assert left >= 2, "the rollout manager, and an actor of a plugin's own"
    assert [gpus for _, gpus in again.engine_seats(0)] in ([()], [(), ()])


def test_what_cannot_fit_is_said_at_once(make: Make) -> None:
    apart = ("--rollout-num-engines", "3", "--rollout-num-gpus-per-engine", "2")
    with pytest.raises(ValueError, match=r"3 times \{.*'GPU': 2.0\} is needed, each on one node .* room for 2$"):
        make([(20, 3), (20, 3), (20, 1)], *apart)
    with pytest.raises(
        ValueError, match="needs 6 GPUs in one placement group beside 2 that it has already but the Ray"
    ):
        make([(20, 7)], *apart, "--train-num-workers", "2")
    with pytest.raises(ValueError, match=r"3 nodes with .* each are needed .* the Ray cluster has 2 such nodes"):
        make([(20, 8), (20, 8), (20, 1)], "--num-nodes", "3", "--num-workers-per-node", "4")


def test_shared_memory_does_not_reach_other_machines(make: Make) -> None:
    nodes, flags = [(20, 1), (20, 1)], ("--train-num-workers", "1")
    with pytest.raises(
        ValueError, match=r"--weight-sync tensor passes memory of one machine: .* 10\.node.*engines are"
    ):
        make(nodes, *flags)
    make(nodes, *flags, "--weight-sync", "distributed")
    make([(20, 2)], *flags)
