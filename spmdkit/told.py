"""What a launcher tells each process that it starts: the names of spmdkit's own environment variables."""

from __future__ import annotations

NUM_PROCESSES = "SPMDKIT_NUM_PROCESSES"
PROCESS_ID = "SPMDKIT_PROCESS_ID"
COORDINATOR = "SPMDKIT_COORDINATOR"
DEVICES_PER_PROCESS = "SPMDKIT_DEVICES_PER_PROCESS"
ERROR_FILE = "SPMDKIT_ERROR_FILE"
"""The file into which a process that fails writes its message, for the launcher that set it."""
