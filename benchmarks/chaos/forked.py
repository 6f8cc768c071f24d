"""The cells of `make chaos` with processes that are forked from one that has imported all modules, in a third of the
processor time. The clock of a forked process cannot be set, so these cells start new ones. Continues a stopped one.

    python benchmarks/chaos/forked.py [CELLS ...]          for example 'kill@*/2'
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from spmdkit.config import load_config
from spmdkit.foundation.timeouts import MATRIX_CELL_S
from spmdkit.tools.drill import cells
from tests.support.compile_cache import FOLDER
from tests.support.forks import Forks, Process

CONFIG = ROOT / "benchmarks/chaos/run.yaml"


def main(patterns: list[str]) -> None:
    config = load_config(CONFIG, [])
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {FOLDER: cache, "JAX_PLATFORMS": "cpu"}
        with Forks() as forks:  # a process that has compared checkpoints cannot fork, so each cell has a command
            for cell in cells.all_cells(patterns):
                if not cells.not_applicable(cell, config):
                    is_clock = cell.kind == "clock"
                    arguments = ["drill", str(CONFIG), "--matrix", "--cells", str(cell)]
                    process = Process(arguments, ROOT, {"SPMDKIT_COMPILE_CACHE": cache}, is_clock, not is_clock)
                    (ended,) = forks.run([process], 2 * MATRIX_CELL_S)
                    print(ended.output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
