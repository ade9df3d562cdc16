from __future__ import annotations

from pathlib import Path

import ray

from slime_rl.cluster.errors import explain, root_cause, write_error_log


def wrapped(cause: Exception) -> Exception:
    return ray.exceptions.RayTaskError("take", "traceback of the worker", cause).as_instanceof_cause()


def test_users_error_comes_through_ray_as_its_own_line() -> None:
    assert explain(wrapped(ValueError("--lr must be >= 0, got -1"))) == ("--lr must be >= 0, got -1", True)


def test_first_error_of_a_group_is_shown() -> None:
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [ValueError("first")]), ValueError("second")])
    assert explain(group) == ("first", True)
    assert str(root_cause(wrapped(group))) == "first"


def test_our_own_bug_names_its_type() -> None:
    assert explain(KeyError("x")) == ("KeyError: 'x'", False)


def test_error_log_holds_the_workers_traceback(tmp_path: Path) -> None:
    said = write_error_log(tmp_path / "run", wrapped(ValueError("bad")))
    assert said == f"the traceback is in {tmp_path / 'run' / 'error.log'}"
    assert "traceback of the worker" in (tmp_path / "run" / "error.log").read_text()


def test_the_traceback_is_not_lost_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    said = write_error_log(tmp_path / "run", wrapped(ValueError("bad")))
    assert "error.log (File exists)" in said and "traceback of the worker" in said
