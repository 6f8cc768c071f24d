"""Data: the batch of step s depends only on (seed, s), on any number of processes and devices.

Input: data of a task (arrays, examples, grain datasets) and the config's `data`. Output: batches on the devices.

    open_source(data)          any data as a source that gathers rows by index          source.py, examples.py
    Schedule, eval_schedule    step -> the indices of its batch; pure arithmetic        schedule.py, permutation.py
    ReadPolicy, SkippedRows    how a user's examples are read, and which are skipped    row_errors.py
    buckets_of                 buckets of lengths                                       buckets.py
    continued, BatchSizes      a batch size that changes at some steps                  batch_sizes.py
    per_process, ProcessRows   different data on each process                           per_process.py, schedule.py
    evaluation_sets            several evaluation sets                                  evaluation_sets.py
    HostBatch                  the rows of one step on this process                     source.py
    host_batches               this process's rows as numpy arrays, from any step on    prefetch.py, grain_reader.py
    device_batches             the same, on the devices, with the wait measured         prefetch.py

There are two kinds of data.
  indexed   a `Source` and a `Schedule`. To resume, call `host_batches(start=step + 1)`: nothing is replayed and no
            iterator state is saved.
  stream    iterators with a position. The record of a checkpoint holds the position after the batch of its step.

    Stream, Shard              the two interfaces of a stream                           streams/base.py
    open_stream(data)          the stream of any data; one module for each kind         streams/*.py
    shards_of                  the shard that supplies a row of a batch                 stream_shards.py
    CheckedStream              a stream that was compared with itself                   open_shards.py
    OpenShards                 the shards that a process reads                          open_shards.py
    start_workers              the same, in worker processes                            stream_workers.py
    StreamReader               this process's rows, with the position after each batch  stream_reader.py
    pack, unpack               a position as JSON                                       stream_position.py

To add a kind of stream, write a module `streams/NAME.py` with `open_stream(data) -> Stream | None`. `Stream` has two
methods, `most_shards` and `open`; the `Shard` that `open` returns has `__next__`, `state` and `close`.
`IteratorShard` (streams/function.py) is such a shard of any iterator.
"""

from spmdkit.data.batch_sizes import BatchSizes as BatchSizes, continued as continued
from spmdkit.data.buckets import buckets_of as buckets_of, shortened_leaves as shortened_leaves
from spmdkit.data.evaluation_sets import EvaluationSets as EvaluationSets, evaluation_sets as evaluation_sets
from spmdkit.data.per_process import PerProcess as PerProcess, per_process as per_process, shares as shares
from spmdkit.data.row_errors import ReadPolicy as ReadPolicy, SkippedRows as SkippedRows
from spmdkit.data.schedule import (
    BatchSchedule as BatchSchedule,
    Bucket as Bucket,
    ProcessRows as ProcessRows,
    Schedule as Schedule,
    StreamSchedule as StreamSchedule,
    continue_sizes as continue_sizes,
    eval_schedule as eval_schedule,
    merge_ranges as merge_ranges,
)
from spmdkit.data.source import (
    HostBatch as HostBatch,
    NumberSource as NumberSource,
    Source as Source,
    open_source as open_source,
    read_step as read_step,
)
from spmdkit.data.stream_position import merge_positions as merge_positions
from spmdkit.data.open_shards import CheckedStream as CheckedStream
from spmdkit.data.stream_reader import (
    StreamReader as StreamReader,
    check_stream as check_stream,
    first_rows as first_rows,
    open_data as open_data,
)
from spmdkit.data.streams.base import Shard as Shard, Stream as Stream, open_stream as open_stream
from spmdkit.data.prefetch import (
    DeviceBatches as DeviceBatches,
    device_batches as device_batches,
    host_batches as host_batches,
)
