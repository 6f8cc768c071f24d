"""`spmdkit verify`: runs the comparison, prints the report and returns the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from spmdkit.config import Config
from spmdkit.verify.report import VerifyOptions, verify_config
from spmdkit.verify.table import print_report


def run_verify(config: Config, options: VerifyOptions, *, as_json: bool) -> int:
    """Returns the exit code: 0 if every case equals one device and every mutant is caught, else 1."""
    report = verify_config(config, options, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(report))
    else:
        print_report(report)
    return 0 if report["passed"] else 1


def sets_batch_size(overrides: Sequence[str]) -> bool:
    """Returns whether the command line sets the batch size. If not, verify chooses a small one."""
    return any(text.partition("=")[0].strip() == "batch_size" for text in overrides)
