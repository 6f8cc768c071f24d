"""Drills of a real job: each kind of fault is injected, detected and survived where possible, and results are
compared."""

import json

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_kill_at_a_step_ends_bitwise_equal(drills):
    ended = drills.by_command("-n", "2", "--kill", "1@17", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)  # nothing else is on standard output
    (fault,) = result["faults"]
    assert (fault["kind"], fault["process"]) == ("kill", 1) and fault["restored"] in (10, 15)
    assert fault["steps_lost"] == 17 - fault["restored"] or fault["step"] > 17, "a step more may be in flight"
    assert 0 <= fault["detection_s"] < fault["recovery_s"]
    assert result["passed"] and result["same_parameters"] and result["same_metrics"] and 0 < result["goodput"] <= 1
    assert {bar[0] for bars in result["bars"] for bar in bars} >= {"start", "step", "dead", "restart"}
    assert not (drills.path / "run").exists(), "the run's own directory was touched"
    page = (drills.path / "run_drill" / "1" / "drill.html").read_text()
    assert page.count('class="timeline"') == 4 and page.count('class="fault"') == 2
    assert drills.by_command("-n", "2", "--kill", "5@17").returncode == 78


@pytest.mark.slow
def test_several_faults_are_injected_in_order(drills):
    faults = ("term:0@12", "truncate:1@24", "corrupt:0@36", "disk-full:0@48", "slow:1@57")
    code, output = drills.run("-n", "2", *(f"--fault={fault}" for fault in faults))
    assert code == 0, output
    result = drills.result()
    by_kind = {fault["kind"]: fault for fault in result["faults"]}
    assert [fault["kind"] for fault in result["faults"]] == ["term", "truncate", "corrupt", "disk-full", "slow"]
    assert by_kind["term"]["steps_lost"] == 0, "all processes save at the agreed step"
    for kind in ("truncate", "corrupt"):
        assert by_kind[kind]["damaged"].startswith("checkpoints/")
        damaged = int(by_kind[kind]["damaged"].split("/")[1])
        assert by_kind[kind]["restored"] < damaged <= by_kind[kind]["step"], "the damaged checkpoint is skipped"
    assert by_kind["slow"]["restored"] is None and by_kind["slow"]["failed"] is None
    assert result["attempts"] in (4, 5), "the failed save is retried, or the job restarts without its metrics"
    assert result["same_parameters"] and result["same_metrics"]


@pytest.mark.slow
def test_bit_flip_is_detected_by_replica_check_only(drills):
    code, output = drills.run("-n", "2", "--fault", "bit-flip:1@11", "replica_check={every_steps: 5, action: rollback}")
    assert code == 0, output
    (fault,) = drills.result()["faults"]
    assert "replicas_differ" in fault["detected_by"] or "rolled_back" in fault["detected_by"]
    assert drills.result()["same_parameters"], "steps computed with the flipped bit are repeated"
    code, output = drills.run("-n", "2", "steps=20", "--fault", "bit-flip:1@11")
    assert code == 1
    assert "was never detected: set replica_check" in output and not drills.result(2)["same_parameters"]


@pytest.mark.slow
def test_nan_is_skipped_or_ends_the_run(drills):
    code, output = drills.run("-n", "2", "steps=20", "--fault", "nan:1@11", "on_nonfinite=skip")
    assert code == 0, output
    (fault,) = drills.result()["faults"]
    assert fault["detected_by"] == "the event 'skipped'" and fault["restored"] is None
    code, output = drills.run("-n", "2", "steps=20", "--fault", "nan:1@11")
    assert code == 1
    assert "the run exited with 77" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "option", "timeout_s", "code"),
    [("stop", "watchdog.heartbeat_timeout_s=4", 4, 75), ("hang", "watchdog.step_timeout_s=3", 3, 76)],
)
def test_watchdog_ends_a_hang_and_the_job_resumes(drills, kind, option, timeout_s, code):
    ended, output = drills.run("-n", "2", "--fault", f"{kind}:1@11", option)
    assert ended == 0, output
    assert f"exit code {code}" in output
    (fault,) = drills.result()["faults"]
    assert timeout_s - 1 < fault["detection_s"] < 2 * timeout_s + drills.result()["undisturbed_start_s"]
    assert drills.result()["same_parameters"] and drills.result()["same_metrics"]


@pytest.mark.slow
def test_full_disk_ends_all_with_74_and_resumes(drills):
    code, output = drills.run("-n", "2", "steps=30", "--fault", "disk-full:0@12", "checkpoint.max_failures=1")
    assert code == 0, output
    (fault,) = drills.result()["faults"]
    # The save of step 10 may still be written at step 12.
    assert fault["exit_code"] == 74 and fault["message"].startswith(("saving step 10 ", "saving step 15 "))
    assert "exit code 74" in output
    assert drills.result()["attempts"] == 2
    assert fault["detection_s"] < drills.result()["undisturbed_work_s"], "no process waits for checkpoint.timeout_s"


@pytest.mark.slow
def test_elastic_job_is_measured_kill_by_kill(drills):
    kills = ["--fault", "kill:2@17", "--fault", "kill:0@38", "devices=cpu:4", "steps=80", "checkpoint.every_steps=15"]
    ended = drills.by_command("-n", "4", *kills, "elastic={in_process: true, snapshot_every: 4}", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert result["attempts"] == 1 and result["same_parameters"] and result["same_metrics"]
    for fault, process, step in zip(result["faults"], (2, 0), (17, 38), strict=True):
        assert (fault["process"], fault["in_process"]) == (process, True) and step <= fault["step"] <= step + 2
        assert 0 <= fault["detection_s"] < fault["recovery_s"]
        assert fault["step"] - 5 <= fault["restored"] and fault["steps_lost"] == fault["step"] - fault["restored"]
    assert result["steps_repeated"] <= 10 and 0 < result["goodput"] < 1


@pytest.mark.storage
def test_store_that_is_down_is_survived(drills):
    ended = drills.by_command("-n", "1", "--fault", "object-store:0@11", "--json")  # clients of a store do not fork
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    (fault,) = result["faults"]
    assert "save_failed" in fault["detected_by"] and result["same_parameters"]
