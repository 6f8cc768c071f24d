"""One rank of the digits example, told to keep its parameters: `python digits_worker.py OUT [arguments of the
example]`."""

import importlib.util
import sys
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_digits.py"


def load():
    """Returns the example as a module."""
    spec = importlib.util.spec_from_file_location("horovod_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    import spmdkit.horovod as hvd

    example = load()
    params = example.train(example.parser.parse_args(sys.argv[2:]))
    np.savez(f"{sys.argv[1]}/{hvd.rank()}.npz", **{name: np.asarray(value) for name, value in params.items()})
