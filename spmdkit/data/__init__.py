"""Data: the batch of step s depends only on (seed, s), on any number of processes and devices.

Input: data of a task (arrays, examples, grain datasets) and the config's `data`. Output: batches on the devices.

    open_source(data)          any data as a source that gathers rows by index          source.py, examples.py
    Schedule, eval_schedule    step -> the indices of its batch; pure arithmetic        schedule.py, permutation.py
    ReadPolicy, SkippedRows    how a user's examples are read, and which are skipped    row_errors.py
    per_process, ProcessRows   different data on each process                           per_process.py, schedule.py
    HostBatch                  the rows of one step on this process                     source.py
    host_batches               this process's rows as numpy arrays, from any step on    stream.py, grain_reader.py
    device_batches             the same, on the devices, with the wait measured         stream.py

To resume, call `host_batches(start=step + 1)`: nothing is replayed and no iterator state is saved.
"""

from spmdkit.data.per_process import PerProcess as PerProcess, per_process as per_process, shares as shares
from spmdkit.data.row_errors import ReadPolicy as ReadPolicy, SkippedRows as SkippedRows
from spmdkit.data.schedule import (
    ProcessRows as ProcessRows,
    Schedule as Schedule,
    eval_schedule as eval_schedule,
    merge_ranges as merge_ranges,
)
from spmdkit.data.source import (
    HostBatch as HostBatch,
    Source as Source,
    open_source as open_source,
    read_step as read_step,
)
from spmdkit.data.stream import (
    DeviceBatches as DeviceBatches,
    device_batches as device_batches,
    host_batches as host_batches,
)
