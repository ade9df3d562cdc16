"""Names, custom paths and flags of algorithms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from algorithm_batches import group_batch, loss_batch
from factories import make_config

from slime_rl.algorithms.compose import compose_loss
from slime_rl.algorithms.registry import ADVANTAGES, OFF_POLICY, POLICY_LOSSES
from slime_rl.config import AlgorithmConfig
from slime_rl.registry import ExtensionPoint

POINTS = [ADVANTAGES, POLICY_LOSSES, OFF_POLICY]


@pytest.mark.parametrize(("point", "name"), [(p, n) for p in POINTS for n in sorted(p.builtins)])
def test_every_name_loads_a_documented_function(point: ExtensionPoint, name: str) -> None:
    function = point.load(name)
    assert function.__name__ == name
    assert function.__doc__


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--policy-loss: 'ppo_clp' is not one of .* did you mean 'ppo_clip'"):
        POLICY_LOSSES.load("ppo_clp")


def test_custom_function_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_algorithms.py").write_text("def good(config, batch): ...\ndef bad(batch): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ADVANTAGES.load("my_algorithms:good").__name__ == "good"
    with pytest.raises(ValueError, match=r"--advantage-estimator: 'my_algorithms:bad' takes \(batch\)"):
        ADVANTAGES.load("my_algorithms:bad")


def test_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[3] / "docs" / "algorithms.md"
    (tmp_path / "docs_example.py").write_text(docs.read_text().split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(tmp_path)
    advantages = ADVANTAGES.load("docs_example:centred")(config, group_batch([[1.0, 0.0], [2.0]]))
    assert advantages.tolist() == [0.0, -1.0, 1.0]
    output = compose_loss(config, loss_batch(), POLICY_LOSSES.load("docs_example:plain"), None)
    expected = POLICY_LOSSES.load("gpg")(config, loss_batch()).loss
    assert output.loss.tolist() == expected.tolist()


def test_listing_names_does_not_import_torch() -> None:
    code = "import sys, slime_rl.algorithms.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"off_policy_rejection": ("tokens",)}, "--off-policy-rejection takes token, .*got 'tokens'"),
        ({"off_policy_lower": 3.0}, r"--off-policy-lower must be <= --off-policy-upper \(2.0\), got 3.0"),
        (
            {"policy_loss": "decoupled_ppo", "off_policy_correction": "tis_token"},
            "--off-policy-correction must not add",
        ),
        ({"policy_loss": "decoupled_ppo", "old_log_probs": "rollout"}, "--old-log-probs must not be rollout"),
        ({"clip_cov_lower": 9.0}, "--clip-cov-lower must be <= --clip-cov-upper"),
        ({"cov_ratio": 1.5}, "--cov-ratio must be <= 1, got 1.5"),
        ({"sapo_tau_neg": 0.0}, "--sapo-tau-neg must be > 0, got 0.0"),
    ],
)
def test_bad_algorithm_flags_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**fields)


def test_overlong_buffer_must_fit_the_response(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--overlong-buffer-len must be <= --max-response-len \(8\), got 9"):
        make_config(tmp_path, "--max-response-len", "8", "--overlong-buffer-len", "9")
