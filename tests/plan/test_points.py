"""`plan --target A,B` and `--sweep`: rows with their reasons, prices, scaling, and the largest batch that fits."""

import contextlib
import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from spmdkit.errors import ConfigError, SpmdkitError
from spmdkit.plan.command import PlanOptions, run_plan
from spmdkit.plan.machine.target import parse_target
from spmdkit.plan.planner import PlanProcesses
from spmdkit.plan.points import reasons
from spmdkit.plan.prices import FILE, Pricing, cost_of, read_prices
from spmdkit.plan.sweep import family_target, largest_batch, read_sweep
from tests.support.plan_files import write


def started_here(command, **_):
    """Runs the command of a plan in this process."""
    subject, *overrides = command[4 : command.index("--json")]
    target = command[command.index("--target") + 1] if "--target" in command else None
    error = ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            run_plan(Path(subject), overrides, PlanOptions(as_json=True, target=target))
        except SpmdkitError as refused:
            error = f"{refused}\n"
    return Mock(**{"communicate.return_value": (out.getvalue(), error)})


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr("spmdkit.plan.planner.start", started_here)
    monkeypatch.setattr("spmdkit.plan.planner.num_workers", lambda: 1)
    monkeypatch.setattr("spmdkit.plan.points.num_workers", lambda: 1)


def plan(tmp_path, capsys, changes=None, **options):
    """Returns (the JSON of the command, its exit code)."""
    code = 0
    try:
        run_plan(write(tmp_path, **(changes or {})), [], PlanOptions(as_json=True, **options))
    except ConfigError as refused:
        code = refused.exit_code
    return json.loads(capsys.readouterr().out), code


def test_targets_are_sorted_with_their_reasons(tmp_path, capsys):
    targets = "cpu:8,v5p-100,gpu:h100:8,gpu:h200:4,cpu:8"
    found, code = plan(tmp_path, capsys, target=targets, tokens=1e9)
    rows = {row["name"]: row for row in found["targets"]}
    assert [row["name"] for row in found["targets"]] == ["gpu:h100:8", "cpu:8", "v5p-100", "gpu:h200:4"]
    assert code == 0 and [row["status"] for row in rows.values()] == ["fits", "fits", "refused", "refused"]
    assert "no slice of v5p has 50 chips" in rows["v5p-100"]["reason"]
    assert rows["cpu:8"]["cost"]["per_hour"] is None
    cost, step_s = rows["gpu:h100:8"]["cost"], rows["gpu:h100:8"]["predicted_step_s"]
    assert cost["per_step"] == pytest.approx(8 * cost["chip_hour"] * step_s / 3600)


def test_reasons_that_differ_in_numbers_are_shown_once():
    rows = [{"name": f"{n}", "status": "refused", "reason": f"15 examples, batch_size {n}"} for n in (16, 32, 64)]
    rows.insert(1, {"name": "8", "status": "does not fit", "reason": "a step needs 15 of 8 GiB"})
    assert reasons(rows) == [
        "16 is refused: 15 examples, batch_size 16",
        "The same holds for 32, 64.",
        "8 does not fit: a step needs 15 of 8 GiB",
    ]


def test_no_target_that_fits_ends_with_78(tmp_path, capsys):
    with pytest.raises(ConfigError, match="none of 2 plans fits") as refused:
        run_plan(write(tmp_path), [], PlanOptions(target="v5p-100, gpu:h100:4"))
    assert refused.value.exit_code == 78
    assert "found 4" in capsys.readouterr().out


def test_a_crashed_plan_is_a_refusal(tmp_path):
    class Crashed:
        returncode = -11
        communicate = staticmethod(lambda timeout=None: ("", "warning\nfatal: no memory\n"))

    def start(command, **options):
        return Crashed

    with PlanProcesses("train.py:make") as processes, pytest.MonkeyPatch.context() as patched:
        patched.setattr("spmdkit.plan.planner.start", start)
        assert processes({}, "cpu:8") == "fatal: no memory"


def test_prices_by_hand():
    tokens_per_s = 1e6
    document = {"target": "tpu:7x:2x2x1", "chip": "7x", "num_devices": 8, "predicted_step_s": 2.0}
    prices = read_prices().model_copy(update={"chip_hour": {"7x": 9.0}})
    found = cost_of(document | {"time": {"tokens_per_s": tokens_per_s}}, Pricing(prices, 3.6e12))
    assert found["per_hour"] == 36.0  # four chips of two devices
    assert found["per_step"] == pytest.approx(0.02)
    assert found["per_billion_tokens"] == pytest.approx(10.0)
    assert (found["hours"], found["total"]) == (1000.0, 36000.0)
    machine = {"target": "a3-megagpu-8g:2", "chip": "h100", "num_devices": 16, "predicted_step_s": 1.0, "time": None}
    assert cost_of(machine, Pricing(read_prices()))["per_hour"] is None  # the price of another machine is not its own
    assert "h100" in read_prices(FILE).sources


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date: '2026'\nchip_hour: {v5p: x}\n", "prices.yaml:2: chip_hour.v5p: should be a valid number"),
        ("date: '2026'\nchip_hours: {v5p: 2}\n", "chip_hours: unknown key. Did you mean 'chip_hour'"),
    ],
)
def test_a_wrong_file_of_prices_is_refused(text, message, tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prices(file)


def test_values_of_a_key_are_rows(tmp_path, capsys):
    files = [tmp_path / name for name in ("page.html", "charts.png")]
    found, code = plan(tmp_path, capsys, sweep="batch_size=32,64,12", html=files[0], plot=files[1])
    assert code == 0 and [row["value"] for row in found["points"]] == [32, 64, 12]
    assert [row["status"] for row in found["points"]] == ["fits", "fits", "refused"]
    assert "must be a multiple of 8" in found["points"][2]["reason"]
    page = files[0].read_text()
    assert page.count("<svg") == page.count("</svg>") == 3 and "must be a multiple of 8" in page
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_scaling_is_strong_and_weak(tmp_path, capsys):
    found, _ = plan(tmp_path, capsys, {"mesh": {"data": -1}}, sweep="devices=2,4")
    rows = {row["name"]: row for row in found["points"]}
    assert {name: row["batch_size"] for name, row in rows.items()} == {
        "2 strong": 64,
        "4 strong": 64,
        "2 weak": 64,
        "4 weak": 128,
    }
    t2, t4, weak = (rows[name]["predicted_step_s"] for name in ("2 strong", "4 strong", "4 weak"))
    assert rows["4 strong"]["efficiency"] == pytest.approx(2 * t2 / (4 * t4))
    assert rows["4 weak"]["efficiency"] == pytest.approx(t2 / weak)


def test_families_have_targets_of_a_size():
    families = ("cpu", "gpu:h100", "h200", "tpu:v5p", "v5litepod", "7x", "a3-megagpu-8g")
    sizes = [parse_target(family_target(family, 16)).num_devices for family in families]
    assert sizes == [16] * 7
    with pytest.raises(ConfigError, match=r"has 8 devices a host or slice\. Try 16"):
        family_target("p5.48xlarge", 12)
    with pytest.raises(ConfigError, match="needs a family of targets, found cpu:8"):
        family_target("cpu:8", 4)


@pytest.mark.parametrize(
    ("needed", "refused_above", "expected", "most"),
    [
        (lambda n: 1000 + 10 * n, None, (896, 904), 5),
        (lambda n: 1000 + n**1.5, None, (432, 440), 9),
        (lambda n: 1000 + 10 * n + 90 * (n % 3), None, (888, 896), 9),
        (lambda n: 10 * n, 500, (496, 504), 12),
        (lambda n: 10**5, None, (None, 8), 1),
    ],
)
def test_the_largest_batch_needs_few_plans(needed, refused_above, expected, most):
    def plan(size):
        if refused_above and size > refused_above:
            return {"value": size, "status": "refused", "reason": "too few examples"}
        status = "fits" if needed(size) <= 10_000 else "does not fit"
        return {"value": size, "status": status, "peak_bytes": needed(size), "limit_bytes": 10_000}

    found = largest_batch(8, 32, plan)
    assert (found.fits, found.fails) == expected and len(found.rows) <= most


def test_the_largest_batch_of_a_config(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spmdkit.program.memory.memory_of_this_machine", lambda: 8 * 200_000)
    found, code = plan(tmp_path, capsys, sweep="batch_size=auto")
    status = {row["value"]: row["status"] for row in found["points"]}
    assert code == 0 and status[found["largest_batch"]] == "fits"
    assert found["does_not_fit"] == found["largest_batch"] + 8 and status[found["does_not_fit"]] == "does not fit"
    monkeypatch.setattr("spmdkit.program.memory.memory_of_this_machine", lambda: 8 * 1000)
    found, code = plan(tmp_path, capsys, sweep="batch_size=auto")
    assert code == 78 and found["largest_batch"] is None and len(found["points"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size", "needs KEY=VALUES"),
        ("batch_size=", "needs KEY=VALUES"),
        ("devices=8,x", "are numbers of devices"),
        ("batch_size=auto,8", "auto is the only value"),
        ("batch_size=[8", "not YAML"),
    ],
)
def test_a_wrong_sweep_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_sweep(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(sweep="batch_sizes=8"), "batch_sizes: unknown key"),
        (PlanOptions(sweep="batch_size=8", search=True), "takes no --search"),
        (PlanOptions(target="cpu:2,cpu:4", diff=Path("x.json")), "takes no --search"),
        (PlanOptions(sweep="batch_size=8", target="cpu:8,cpu:4"), "and one target"),
        (PlanOptions(plot=Path("x.png")), "--plot has no effect without --sweep"),
        (PlanOptions(tokens=-1.0), "--tokens is -1"),
    ],
)
def test_options_without_effect_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_plan(write(tmp_path), [], options)
