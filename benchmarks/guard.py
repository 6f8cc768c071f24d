"""What it costs the host that the step looks for what is not finite: an empty step, with `on_nonfinite` stop or skip
against continue.

    python benchmarks/guard.py [--steps 20000] [--log-every 10] [--devices 1 2 8] [--json]

One process with one device, two replicas, and 8 devices that cut the state (`fsdp: 8`), where each device has a code of
its own; the loop is the toolkit's. Blocks of the three take turns, as in watchdog.py. Exit code 1 where `stop`, the
default, takes the training thread more than 50 us a step.
What it costs the devices is read from the compiled program: tests/step/test_guard_cost.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from watchdog import BLOCKS, MAX_S, Loop, train_interleaved

MESHES = {1: {}, 2: {"data": 2}, 8: {"fsdp": 8}}
POLICIES = ("continue", "stop", "skip")


def sitting(devices: int, steps: int, log_every: int) -> dict[str, list[float]]:
    """Returns seconds of (process, training thread) a step, by policy, measured in this process."""
    each = steps // BLOCKS
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            policy: Loop(
                Path(folder) / policy,
                steps + each + 1,
                f"cpu:{devices}",
                mesh=MESHES[devices],
                on_nonfinite=policy,
                log={"every_steps": log_every, "progress": "off"},
            )
            for policy in POLICIES
        }
        return train_interleaved(loops, each)


def main() -> int:
    """Returns 0 where the cost is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="of each policy")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--devices", type=int, nargs="*", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--sitting", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.sitting:
        print(json.dumps(sitting(asked.sitting, asked.steps, asked.log_every)))
        return 0
    worst = 0.0
    for devices in asked.devices:
        command = [sys.executable, __file__, "--sitting", str(devices), "--steps", str(asked.steps)]
        done = subprocess.run(
            [*command, "--log-every", str(asked.log_every)], stdout=subprocess.PIPE, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        base = found["continue"]
        cost = {policy: [a - b for a, b in zip(found[policy], base, strict=True)] for policy in POLICIES[1:]}
        worst = max(worst, cost["stop"][1])
        if asked.json:
            print(json.dumps({"devices": devices, "steps": asked.steps, "s_a_step": found, "cost": cost}))
            continue
        for policy, (process, thread) in cost.items():
            print(
                f"{devices} devices, {policy:5} {process * 1e6:+7.1f} us a step of the process, {thread * 1e6:+7.1f} "
                f"us of the training thread ({base[1] * 1e6:.0f} without)"
            )
    return int(worst > MAX_S)


if __name__ == "__main__":
    sys.exit(main())
