from __future__ import annotations

from pathlib import Path

import pytest

from tools import gpu_smoke


def test_every_check_is_skipped_with_its_reason_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_smoke, "num_gpus", lambda: 0)
    assert gpu_smoke.main(["--output", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["SKIPPED", name] for name in gpu_smoke.CHECKS]
    assert all("needs" in line and "torch finds 0" in line for line in lines)
    assert last == f"passed=0 failed=0 skipped={len(gpu_smoke.CHECKS)}"


def test_a_failed_check_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(place: gpu_smoke.Place) -> str:
        return gpu_smoke.run(["bash", "-c", "echo the reason; exit 3"], place, 20)

    checks = {"broken": broken, "whole": lambda place: "well"}
    monkeypatch.setattr(gpu_smoke, "CHECKS", checks)
    monkeypatch.setattr(gpu_smoke, "num_gpus", lambda: 0)
    assert gpu_smoke.main(["--output", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED  broken" in out and "exit code 3" in out and "the reason" in out
    assert "PASSED  whole" in out and "passed=1 failed=1 skipped=0" in out
