"""A real job hurt on order: each kind of fault is done, noticed, survived where it can be, and the bits are
compared."""

import json

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_kill_at_a_step_is_noticed_at_once_and_leaves_the_same_bits(drills):
    ended = drills.by_hand("-n", "2", "--kill", "1@17", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)  # nothing else is there
    (fault,) = result["faults"]
    assert (fault["kind"], fault["process"], fault["step"], fault["restored"]) == ("kill", 1, 17, 15) or fault[
        "restored"
    ] == 10
    assert (
        fault["steps_lost"] == 17 - fault["restored"] or fault["step"] > 17
    )  # a step more may be in flight in the other
    assert 0 <= fault["detection_s"] < 3 and fault["detection_s"] < fault["recovery_s"] < 60
    assert result["passed"] and result["same_parameters"] and result["same_metrics"] and 0 < result["goodput"] <= 1
    assert {bar[0] for bars in result["bars"] for bar in bars} >= {"start", "step", "dead", "restart"}
    assert not (drills.path / "run").exists(), "the run's own directory was touched"
    page = (drills.path / "run_drill" / "1" / "drill.html").read_text()
    assert page.count('class="chart timeline"') == 2 and page.count('class="fault"') == 1
    assert drills.by_hand("-n", "2", "--kill", "5@17").returncode == 78


@pytest.mark.slow
def test_several_faults_in_one_drill_come_one_after_the_other(drills):
    code, output = drills.run(
        "-n",
        "2",
        *(f"--fault={f}" for f in ("term:0@12", "truncate:1@24", "corrupt:0@36", "disk-full:0@48", "slow:1@57")),
    )
    assert code == 0, output
    result = drills.result()
    told = {fault["kind"]: fault for fault in result["faults"]}
    assert [fault["kind"] for fault in result["faults"]] == ["term", "truncate", "corrupt", "disk-full", "slow"]
    assert told["term"]["steps_lost"] == 0, "what all agreed on is saved"
    for kind in ("truncate", "corrupt"):
        assert told[kind]["damaged"].startswith("checkpoints/")
        assert told[kind]["restored"] < int(told[kind]["damaged"].split("/")[1]) <= told[kind]["step"], (
            "the damaged one is passed over"
        )
    assert told["slow"]["restored"] is None and told["slow"]["failed"] is None
    assert result["attempts"] in (4, 5), (
        "a disk that is full is made up for, or where the metrics cannot be written a restart"
    )
    assert result["same_parameters"] and result["same_metrics"]


def test_a_fault_that_does_not_come_fails_the_drill(drills):
    code, output = drills.run("-n", "1", "steps=20", "--fault", "kill:0@900s")
    assert code == 1
    assert "1 of 1 faults did not come before the run was over" in output
    assert drills.result()["fired"] == 0


@pytest.mark.slow
def test_a_flipped_bit_is_noticed_where_copies_are_compared_and_fails_the_drill_where_not(drills):
    code, output = drills.run("-n", "2", "--fault", "bit-flip:1@11", "replica_check={every_steps: 5, action: rollback}")
    assert code == 0, output
    (fault,) = drills.result()["faults"]
    assert "replicas_differ" in fault["detected_by"] or "rolled_back" in fault["detected_by"]
    assert drills.result()["same_parameters"], "what was computed with it was computed again"
    code, output = drills.run("-n", "2", "steps=20", "--fault", "bit-flip:1@11")
    assert code == 1
    assert "was never noticed: set replica_check" in output and not drills.result(2)["same_parameters"]


@pytest.mark.slow
def test_a_nan_in_one_process_is_left_out_or_ends_the_run_as_the_config_says(drills):
    code, output = drills.run("-n", "2", "steps=20", "--fault", "nan:1@11", "on_nonfinite=skip")
    assert code == 0, output
    (fault,) = drills.result()["faults"]
    assert fault["detected_by"] == "the event 'skipped'" and fault["restored"] is None
    code, output = drills.run("-n", "2", "steps=20", "--fault", "nan:1@11")
    assert code == 1
    assert "the run ended with exit code 77" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [("stop", ["watchdog.heartbeat_timeout_s=4"], 75), ("hang", ["watchdog.step_timeout_s=3"], 76)],
)
def test_what_hangs_is_ended_by_the_watchdog_and_goes_on(drills, kind, options, code):
    ended, output = drills.run("-n", "2", "--fault", f"{kind}:1@11", *options)
    assert ended == 0, output
    assert f"exit code {code}" in output
    (fault,) = drills.result()["faults"]
    assert fault["detection_s"] > 2
    assert drills.result()["same_parameters"] and drills.result()["same_metrics"]


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_save_too_many_ends_all_with_74_at_once_and_a_restart_goes_on(drills):
    code, output = drills.run("-n", "2", "--fault", "disk-full:0@12", "checkpoint.max_failures=1")
    assert code == 0, output
    assert "exit code 74" in output and "saving step 15" in output
    assert len(drills.result()["faults"]) == 1 and drills.result()["attempts"] == 2


@pytest.mark.slow
def test_a_job_that_goes_on_in_process_is_measured_kill_by_kill_in_one_start(drills):
    told = [
        "--fault",
        "kill:2@17",
        "--fault",
        "kill:0@38",
        "devices=cpu:4",
        "elastic={in_process: true, snapshot_every: 4}",
    ]
    ended = drills.by_hand("-n", "4", *told, "steps=80", "checkpoint.every_steps=15", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert result["attempts"] == 1 and result["same_parameters"] and result["same_metrics"]
    for fault, process, step in zip(result["faults"], (2, 0), (17, 38), strict=True):
        assert (fault["process"], fault["in_process"]) == (process, True) and step <= fault["step"] <= step + 2
        assert 0 <= fault["detection_s"] < 3 and fault["detection_s"] < fault["recovery_s"] < 60
        assert fault["step"] - 5 <= fault["restored"] and fault["steps_lost"] == fault["step"] - fault["restored"]
    assert result["steps_repeated"] <= 10 and 0 < result["goodput"] < 1
