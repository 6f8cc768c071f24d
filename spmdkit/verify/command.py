"""What `spmdkit verify` does with its options: prove, write the certificate, print, and leave with 0 or 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdkit.config import Config
from spmdkit.verify import certificate as certificates
from spmdkit.verify.report import VerifyOptions, verify
from spmdkit.verify.table import print_report


def run_verify(config: Config, options: VerifyOptions, *, certificate: Path | None, as_json: bool) -> int:
    """Returns the exit code: 0 where every case is equal to one device and every mutant is caught, else 1."""
    report = verify(config, options, lambda text: print(text, file=sys.stderr, flush=True))
    if certificate is not None:
        certificates.write(certificate, report)
        if not options.mutants:
            print(
                "note: train refuses a certificate that was made with --no-mutants: nothing shows that a mistake would have been seen. Run without it.",
                file=sys.stderr,
                flush=True,
            )
    if as_json:
        print(json.dumps(report))
    else:
        print_report(report)
    return 0 if report["passed"] else 1


def gives_batch_size(overrides: Sequence[str]) -> bool:
    """Returns whether the batch size was asked for on the command line; otherwise verify chooses a small one."""
    return any(text.partition("=")[0].strip() == "batch_size" for text in overrides)
