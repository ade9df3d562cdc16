"""`--sglang-config`: what a file gives, and what is refused with its place in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_config, write_model_folder

from slime_rl.config import Config
from slime_rl.config.served_models import ServerGroup, worker_type_of


def write(tmp_path: Path, text: str) -> str:
    judge = write_model_folder(tmp_path / "judge")
    (tmp_path / "engines.yaml").write_text(text.replace("JUDGE", str(judge)))
    return str(tmp_path / "engines.yaml")


def config_of(tmp_path: Path, text: str, *flags: str) -> Config:
    return make_config(tmp_path, "--sglang-config", write(tmp_path, text), *flags)


TWO_MODELS = """
sglang:
  - name: judge
    model_path: JUDGE
    server_groups: [{num_gpus: 4, num_gpus_per_engine: 2, overrides: {is_embedding: true, served-model-name: j}}]
  - name: actor
    server_groups:
      - {num_gpus: 2, overrides: {max_running_requests: 8, json-model-override-args: {a: 1}, enable-metrics: false}}
      - {num_gpus: 1, worker_type: regular}
"""


def test_groups_have_arguments_of_their_own_and_the_policy_comes_first(tmp_path: Path) -> None:
    config = config_of(tmp_path, TWO_MODELS, "--sglang-context-length", "200")
    policy, judge = config.served_models
    words = ("--max-running-requests=8", '--json-model-override-args={"a": 1}')
    assert (policy.name, policy.is_policy) == ("actor", True)
    assert policy.groups == (ServerGroup(2, 1, words), ServerGroup(1, 1))
    assert (judge.name, judge.is_policy) == ("judge", False)
    assert judge.groups == (ServerGroup(2, 2, ("--is-embedding", "--served-model-name=j")),)
    assert (config.cluster.rollout_num_engines, config.num_gpus_beside) == (3, 4)
    own = config.for_engine(policy, policy.groups[0])
    assert own.engine.sglang_args == ("--context-length", "200", *words)
    beside = config.for_engine(judge, judge.groups[0])
    assert beside.engine.sglang_args == ("--is-embedding", "--served-model-name=j"), "--sglang-* is the policy's"
    assert beside.model.hf_checkpoint == str(tmp_path / "judge")
    assert beside.cluster.rollout_num_gpus_per_engine == 2
    assert config.model.hf_checkpoint == str(tmp_path / "model"), "the run's own stays"


def test_without_a_file_there_is_one_group(tmp_path: Path) -> None:
    (model,) = make_config(tmp_path, "--rollout-num-engines", "3").served_models
    assert (model.groups, model.model_path) == ((ServerGroup(3, 1),), None)


POLICY = "sglang: [{name: p, server_groups: [{num_gpus: 2}]}"
OTHER = ", {name: j, model_path: JUDGE, server_groups: [{num_gpus: 1}]}]"


def test_a_reward_may_come_from_a_model_beside_the_policy(tmp_path: Path) -> None:
    flags = ("--rm-type", "judge", "--reward-url")
    assert config_of(tmp_path, POLICY + OTHER, *flags, "sglang:j").reward.reward_url == "sglang:j"
    with pytest.raises(ValueError, match=r"--reward-url must name a model of --sglang-config .* \(j\), got 'sglang:p'"):
        config_of(tmp_path, POLICY + OTHER, *flags, "sglang:p")
    with pytest.raises(ValueError, match=r"there is none"):
        make_config(tmp_path, *flags, "sglang:j")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: []", "must hold one key, sglang, with a list of models"),
        ("sglang: [", "not YAML"),
        ("sglang: [{name: p, servers: []}]", "model 0 may have the keys name, .*, got 'servers'"),
        ("sglang: [{name: p q, server_groups: [{num_gpus: 1}]}]", "must have a name"),
        ("sglang: [{name: p, server_groups: []}]", "server_groups must be a list"),
        ("sglang: [{name: p, server_groups: [{num_gpus: 0}]}]", "group 0 num_gpus must be a whole number > 0, got 0"),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]",
            r"must be a multiple of num_gpus_per_engine \(2\), got 3",
        ),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1, worker_type: prefill}]}]",
            "worker_type must be prefill and decode in its groups, both of them, or regular in all",
        ),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1, worker_type: encode}]}]",
            "worker_type must be one of regular, prefill, decode, got 'encode'",
        ),
        ("sglang: [{name: p, server_groups: [{num_gpus: 1, overrides: [a]}]}]", "overrides must be a mapping"),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1, overrides: {page-size: }}]}]",
            "must give page-size a value",
        ),
        ("sglang: [{name: p, server_groups: [{num_gpus: 1, num_gpus: 2}]}]", "num_gpus is there twice"),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1, overrides: {page-size: 1, page_size: 2}}]}]",
            "line 1: page_size is there twice",
        ),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1}, {num_gpus: 1, overrides: {dtype: float16}}]}]",
            r"must give all groups the same dtype, since engines are compared .*, got \[None, 'float16'\]",
        ),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1, worker_type: prefill, overrides: {page-size: 4}},"
            " {num_gpus: 1, worker_type: decode}]}]",
            r"must give all groups the same page-size, since caches go .*, got \['4', None\]",
        ),
        ("sglang: [{name: p, model_path: /none, server_groups: [{num_gpus: 1}]}]", "must be a folder that exists"),
        ("sglang: [{name: j, model_path: JUDGE, server_groups: [{num_gpus: 1}]}]", "exactly one model with update"),
        (POLICY + OTHER.replace("name: j", "name: p"), "every model a name of its own"),
        (
            "sglang: [{name: p, server_groups: [{num_gpus: 1, worker_type: prefill},"
            " {num_gpus: 2, num_gpus_per_engine: 2, worker_type: decode}]}]",
            r"all engines of p the same num_gpus_per_engine, since caches go between them, got \(1, 2\)",
        ),
        (
            "sglang: [{name: p, model_path: JUDGE, update_weights: true, server_groups: [{num_gpus: 1}]}]",
            "p: model_path must be --hf-checkpoint",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--sglang-config.*{message}"):
        config_of(tmp_path, text)


SIZES = "sglang: [{name: p, server_groups: [{num_gpus: 4, num_gpus_per_engine: 4}, {num_gpus: 2}, {num_gpus: 4}]}]"


def sizes_of(config: Config) -> list[int]:
    policy = config.served_models[0]
    own = [config.for_engine(policy, group) for group in policy.groups for _ in range(group.num_engines)]
    return [config.cluster.rollout_num_gpus_per_engine for config in own]


def test_engines_of_the_policy_may_differ_in_size(tmp_path: Path) -> None:
    config = config_of(tmp_path, SIZES)
    assert sizes_of(config) == [4, 1, 1, 1, 1, 1, 1], "in the order of the groups"
    assert config.cluster.rollout_num_engines == 7
    config = config_of(tmp_path, SIZES, "--rollout-num-gpus-per-engine", "2", "--rollout-num-gpus", "10")
    assert sizes_of(config) == [4, 2, 2, 2], "the flag is for groups that do not say it"
    config_of(tmp_path, SIZES, "--rollout-num-gpus-per-node", "2", "--weight-sync", "disk")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rollout-num-gpus", "9"), r"--rollout-num-gpus must be as in --sglang-config .*\.yaml = 10, got 9"),
        (("--rollout-num-gpus-per-engine", "8"), r"num_gpus must be a multiple of num_gpus_per_engine \(8\), got 2"),
        (
            ("--colocate", "--train-num-workers", "8", "--rollout-batch-size", "8"),
            r"--rollout-num-engines engines of 4 and 1 GPUs, 10 together, do not fit on the 8 of the train .*, got 7",
        ),
        (("--rollout-num-gpus-per-node", "2"), "--weight-sync must not be tensor where an engine spans 2 nodes"),
        (("--rollout-num-gpus-per-node", "3"), r"num_gpus_per_engine must be at most .* \(3\) .* got 4"),
    ],
)
def test_sizes_that_do_not_fit_the_other_flags_are_refused(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, SIZES, *flags)


def test_the_size_of_the_policy_is_not_that_of_a_judge(tmp_path: Path) -> None:
    judge = "{name: j, model_path: JUDGE, server_groups: [{num_gpus: 3}]}]"
    text = f"sglang: [{{name: p, server_groups: [{{num_gpus: 4, num_gpus_per_engine: 2}}]}}, {judge}"
    for flags in ((), ("--rollout-num-gpus-per-engine", "2")):
        _, beside = config_of(tmp_path, text, *flags).served_models
        assert [(group.num_engines, group.num_gpus_per_engine) for group in beside.groups] == [(3, 1)]


def test_a_size_that_no_group_has_is_refused(tmp_path: Path) -> None:
    text = SIZES.replace("{num_gpus: 2}, {num_gpus: 4}", "{num_gpus: 2, num_gpus_per_engine: 2}")
    assert sizes_of(config_of(tmp_path, text)) == [4, 2]
    with pytest.raises(ValueError, match=r"--rollout-num-gpus-per-engine must be 4 or 2 as in .*\.yaml, or left out"):
        config_of(tmp_path, text, "--rollout-num-gpus-per-engine", "8")


DISAGGREGATED = """sglang: [{name: p, server_groups: [
    {num_gpus: 2, worker_type: prefill, overrides: {chunked-prefill-size: 512}},
    {num_gpus: 1, worker_type: decode}]}]"""


def test_prefill_and_decode_engines(tmp_path: Path) -> None:
    config = config_of(tmp_path, DISAGGREGATED)
    (policy,) = config.served_models
    assert policy.is_disaggregated and config.cluster.rollout_num_engines == 3
    found = [config.for_engine(policy, group).engine.sglang_args for group in policy.groups]
    assert found == [("--disaggregation-mode=prefill", "--chunked-prefill-size=512"), ("--disaggregation-mode=decode",)]
    assert [worker_type_of(arguments) for arguments in [*found, ()]] == ["prefill", "decode", "regular"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rollout-ahead", "1"), "--rollout-ahead cannot be used with prefill and decode engines"),
        (("--fully-async", "--max-staleness", "1"), "--fully-async cannot be used with prefill and decode engines"),
        (("--colocate", "--train-num-workers", "4"), "--colocate cannot be used with prefill and decode engines"),
        (("--engine-slow-s", "1"), "--engine-slow-s cannot be used with prefill and decode engines"),
    ],
)
def test_what_prefill_and_decode_engines_cannot_do_is_refused(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, DISAGGREGATED, "--rollout-batch-size", "8", *flags)


def test_a_router_is_shared_by_several_models_that_are_not_disaggregated(tmp_path: Path) -> None:
    judge = "{name: j, model_path: JUDGE, server_groups: [{num_gpus: 1}]}"
    assert config_of(tmp_path, f"{POLICY}, {judge}]", "--share-router").router.share_router
    with pytest.raises(
        ValueError, match=r"--share-router needs a --sglang-config with more than one model, got \['p'\]"
    ):
        config_of(tmp_path, f"{POLICY}]", "--share-router")
    apart = DISAGGREGATED.replace("sglang: [{name: p", "{name: j, model_path: JUDGE").replace("]}]", "]}")
    with pytest.raises(ValueError, match=r"--share-router cannot be used with prefill and decode .*, got \['j'\]"):
        config_of(tmp_path, f"{POLICY}, {apart}]", "--share-router")


def test_a_policy_that_the_router_cannot_start_with_is_refused(tmp_path: Path) -> None:
    judge = "{name: j, model_path: JUDGE, server_groups: [{num_gpus: 1}]}"
    text, flags = f"{POLICY}, {judge}]", ("--router-policy", "power_of_two")
    assert config_of(tmp_path, text, "--share-router", *flags).router.router_policy == "power_of_two"
    rule = r"--router-policy must not be power_of_two without --share-router: .*, got 'power_of_two'"
    with pytest.raises(ValueError, match=rule):
        config_of(tmp_path, text, *flags)
    with pytest.raises(ValueError, match=rule):
        make_config(tmp_path, *flags)


@pytest.mark.parametrize("name", ["j" * 201, "\u00fc" * 101])
def test_a_name_that_cannot_be_that_of_a_log_is_refused(tmp_path: Path, name: str) -> None:
    judge = "{name: %s, model_path: JUDGE, server_groups: [{num_gpus: 1}]}"
    with pytest.raises(ValueError, match=rf"model 1 must have a name of at most 200 bytes, .*, got '{name}'"):
        config_of(tmp_path, f"{POLICY}, {judge % name}]")
    config_of(tmp_path, f"{POLICY}, {judge % name[:-1]}]")


def test_the_last_prefill_engine_of_a_judge_stays_too(tmp_path: Path) -> None:
    judge = DISAGGREGATED.replace("sglang: [{name: p", "{name: j, model_path: JUDGE").replace("]}]", "]}")
    with pytest.raises(ValueError, match="--engine-slow-s cannot be used with prefill and decode engines"):
        config_of(tmp_path, f"{POLICY}, {judge}]", "--engine-slow-s", "1")
    config_of(tmp_path, f"{POLICY}, {judge}]", "--rollout-batch-size", "8", "--rollout-ahead", "1")


def test_the_size_of_a_model_is_checked_also_where_every_group_has_its_own(tmp_path: Path) -> None:
    text = SIZES.replace("{name: p,", "{name: p, num_gpus_per_engine: 0,")
    with pytest.raises(ValueError, match=r"model 0 num_gpus_per_engine must be a whole number > 0, got 0"):
        config_of(tmp_path, text)


def test_engines_of_every_model_fill_whole_nodes(tmp_path: Path) -> None:
    flags = ("--rollout-num-gpus-per-node", "4", "--weight-sync", "disk")
    judge = "{name: j, model_path: JUDGE, server_groups: [{num_gpus: SIZE, num_gpus_per_engine: SIZE}]}]"
    large = config_of(tmp_path, f"{POLICY}, {judge.replace('SIZE', '8')}", *flags)
    model = large.served_models[1]
    assert large.for_engine(model, model.groups[0]).cluster.nodes_per_engine == 2
    with pytest.raises(ValueError, match=r"\.yaml: j: num_gpus_per_engine must be at most .* \(4\) .* got 6"):
        config_of(tmp_path, f"{POLICY}, {judge.replace('SIZE', '6')}", *flags)


def test_counts_on_the_command_line_must_agree(tmp_path: Path) -> None:
    config_of(tmp_path, POLICY + "]", "--rollout-num-engines", "2")
    with pytest.raises(
        ValueError, match=r"--rollout-num-engines must be 2 as in --sglang-config .*, or left out, got 3"
    ):
        config_of(tmp_path, POLICY + "]", "--rollout-num-engines", "3")
    with pytest.raises(ValueError, match="cannot be used with --rollout-external-engine-addrs"):
        config_of(tmp_path, POLICY + "]", "--rollout-external-engine-addrs", "http://a:1", "http://b:1")
