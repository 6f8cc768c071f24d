"""The table of environments lies beside the tests that read it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
