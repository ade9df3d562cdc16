from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_rl import doctor
from slime_rl.doctor import Finding, Package, Verdict, as_text, check_package, packages, run_program

ROOT = Path(__file__).resolve().parents[2]


def test_package_that_imports_is_ok_with_its_version() -> None:
    finding = check_package(Package(distribution="pytest", code="import pytest"), on_gpu=False)
    assert finding.verdict is Verdict.OK
    assert finding.value.startswith(f"{pytest.__version__}, imports in ")


def test_missing_package_says_what_to_do() -> None:
    finding = check_package(Package(distribution="no-such-distribution", code=""), on_gpu=False)
    assert (finding.verdict, finding.value) == (Verdict.PROBLEM, "not installed")
    assert "scripts/install_cpu.sh" in finding.remedy


def test_missing_optional_package_is_a_warning_or_nothing() -> None:
    optional = Package(distribution="no-such-distribution", code="", needed=False, remedy="only --x needs it")
    assert check_package(optional, on_gpu=False).verdict is Verdict.WARNING
    useless = Package(distribution="no-such-distribution", code="", needed=False)
    assert check_package(useless, on_gpu=False).verdict is Verdict.OK


def test_import_that_crashes_is_a_finding_with_its_last_words() -> None:
    crash = Package(distribution="pytest", code="raise OSError('libcuda.so.1: cannot open shared object file')")
    finding = check_package(crash, on_gpu=False)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.value.endswith("does not import: OSError: libcuda.so.1: cannot open shared object file")


def test_program_that_hangs_is_killed_with_its_children() -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    code = f"import subprocess, sys, time; {child}; time.sleep(600)"
    start = time.monotonic()
    outcome = run_program([sys.executable, "-c", code], timeout_s=1.0)
    assert not outcome.ok and outcome.last_line == "no answer after 1 s"
    assert time.monotonic() - start < 300


def test_program_that_dies_silently_tells_its_exit_code() -> None:
    outcome = run_program([sys.executable, "-c", "import os; os._exit(3)"], timeout_s=300)
    assert (outcome.ok, outcome.last_line) == (False, "exit code 3")


def test_machine_itself_passes_and_names_its_limits(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in [*doctor._system(), *doctor._resources(tmp_path), doctor._ports()]}
    assert findings["Python"].verdict is Verdict.OK
    assert {"cores", "memory available", f"disk free at {tmp_path}", "ports"} <= set(findings)
    assert all(finding.remedy for finding in findings.values() if finding.verdict is not Verdict.OK)


@pytest.mark.parametrize(
    "folder",
    [
        Path("/proc"),  # refuses even root
        pytest.param(Path("gone"), id="gone"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_a_finding(folder: Path, tmp_path: Path) -> None:
    found = doctor._disk(tmp_path / folder)
    assert found.verdict is Verdict.WARNING and "cannot be written to: " in found.value
    assert "--run-dir" in found.remedy


def test_it_answers_from_a_folder_that_was_removed(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = f"import os, sys; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r}); "
    program += f"sys.path.insert(0, {str(ROOT)!r}); from slime_rl import doctor; sys.exit(doctor.main([]))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("-> cd into a folder that is there\nNOT READY: current folder\n")


def test_files_cached_within_the_limit_of_a_container_count_as_room(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert doctor._memory_limit_bytes(tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 600000\nactive_file 100000\ninactive_file 450000\n")
    assert doctor._memory_limit_bytes(tmp_path) == 650_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flags\t\t: fpu avx512_bf16 avx512f\n", "avx512_bf16: --train-dtype bfloat16"),
        ("Features\t: fp asimd bf16\n", "bf16: --train-dtype bfloat16"),
        ("flags\t\t: fpu avx2 avx512f\n", "not on these cores"),
        (None, "not on these cores"),
    ],
)
def test_doctor_says_whether_cores_multiply_bfloat16(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}")
    assert doctor._bfloat16(tmp_path / "cpuinfo").startswith(said)


def findings(verdict: Verdict) -> list[Finding]:
    return [
        Finding(topic="device", name="GPUs", verdict=Verdict.OK, value="none: runs use the CPU"),
        Finding(topic="packages", name="ray", verdict=verdict, value="not installed", remedy="install it"),
    ]


def test_text_ends_with_the_verdict_and_has_remedies_below() -> None:
    lines = as_text(findings(Verdict.PROBLEM)).splitlines()
    assert lines[-1] == "NOT READY: ray"
    assert [line.strip() for line in lines if "->" in line] == ["-> install it"]
    assert as_text(findings(Verdict.WARNING)).splitlines()[-1] == "READY for a run on CPU"


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.OK, 0), (Verdict.WARNING, 0), (Verdict.PROBLEM, 1)])
def test_exit_code_says_whether_a_run_is_possible(
    verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda folder, with_ray: findings(verdict))
    assert doctor.main(["--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is (code == 0)
    assert report["findings"][1] == {
        "topic": "packages", "name": "ray", "verdict": str(verdict), "value": "not installed", "remedy": "install it",
    }  # fmt: skip


def test_it_runs_where_nothing_is_installed() -> None:
    program = "import sys; sys.argv = ['doctor', '--no-ray']; import runpy; "
    program += f"sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('slime_rl.doctor', run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr == ""
    assert "-> run `bash scripts/install_cpu.sh`" in done.stdout
    assert "NOT READY: torch, transformers, megatron-core" in done.stdout


def test_every_dependency_of_a_run_is_looked_at() -> None:
    setup = ast.parse((ROOT / "setup.py").read_text())
    lists = [ast.literal_eval(node.value) for node in setup.body if isinstance(node, ast.Assign)]  # CORE and ENGINES
    needed = {re.split(r"[>=<]", name)[0] for names in lists for name in names} - {"einops"}  # which SGLang imports
    assert needed <= {package.distribution for package in packages(on_gpu=False)}


def test_every_backend_of_a_run_is_looked_at() -> None:
    for on_gpu in (False, True):
        needed = {package.distribution for package in doctor.packages(on_gpu) if package.needed}
        assert {"torch", "transformers", "megatron-core", "mbridge", "ray", "sglang", "sglang-router"} <= needed
