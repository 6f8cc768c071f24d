"""Every timeout and interval of the package, in seconds. Each wait is bounded by one of these or by the config.

Each comment describes the wait. A `*_S` constant in another file is not a wait but a size, a rate or a physical
quantity. User-defined timeouts are in the config (`watchdog`, `checkpoint`, ...); see docs/howto/faults.md.
"""

from __future__ import annotations

# ---- processes join ----
RENDEZVOUS_S = 120.0  # all processes, for the last one to start; SPMDKIT_RENDEZVOUS_TIMEOUT_S overrides it
RENDEZVOUS_CONNECT_S = 5.0  # one attempt to connect to process 0
RENDEZVOUS_RETRY_S = 0.05  # between two attempts to connect to process 0
FAILURE_REPORT_S = 3.0  # a process that failed before the rendezvous, for the others to connect
RENDEZVOUS_REPLY_MARGIN_S = 5.0  # process 0 reports at its deadline; the others wait this much longer for it
JAX_INITIALIZE_S = 30  # jax.distributed.initialize, after the rendezvous: bounds a process that dies in that second
COLLECTIVE_MARGIN_S = 60  # Gloo fails this much after the longest watchdog limit: its error names no process
SERVICE_START_S = 30.0  # for the process of the coordination service to listen
SERVICE_CONNECT_S = 5.0  # a connection to it; JAX's client then tries again
SERVICE_HEARTBEAT_S = 100_000_000  # disabled: JAX uses wall time, so a paused job would abort. The watchdog decides
SERVICE_SHUTDOWN_S = 15  # jax.distributed.shutdown; with JAX's default of 300 a failing process hangs at exit

# ---- processes exchange values ----
EXCHANGE_S = 600.0  # for a value that another process publishes, and at a barrier
EXCHANGE_REPORT_S = 30.0  # a process that has read a problem, until all others have read it
COMPARISON_REPLY_S = 20.0  # for the differences that another process reports
COMPARISON_LINGER_S = 0.5  # process 0, after that: JAX aborts a process that loses the coordination service
AGREEMENT_INTERVAL_S = 0.05  # between two updates of the horizon, see cluster/agreement.py

# ---- startup checks ----
FIRST_COMPARISON_S = 60.0  # for all processes, right after they have joined
BURN_IN_S = 3.0  # each device computes
BURN_IN_READY_S = 300.0  # all devices, to compile the first chain
HOST_CONNECT_S = 3.0  # to another host
HOST_CHECK_S = 120.0  # for the results of all hosts: each connects to all others sequentially
RUN_DIRECTORY_VISIBLE_S = 5.0  # for a file that process 0 has written: NFS caches a directory for seconds
RUN_DIRECTORY_POLL_S = 0.05  # between two checks for that file
DOCTOR_COLLECTIVE_S = 30.0  # a collective in `spmdkit doctor`
DOCTOR_START_S = 600.0  # for the first step in `spmdkit doctor --start`

# ---- watchdog and exit ----
WATCHDOG_TICK_S = 0.2  # between two polls of the watchdog
HEARTBEAT_INTERVAL_S = 1.0  # between two heartbeats
HANG_SUSPECT_S = 3.0  # without a heartbeat: the first process is suspected of a hang
MIN_STEP_TIMEOUT_S = 60.0  # minimum step timeout if it is derived from the usual step time
FIRST_BATCH_TIMEOUT_S = 300.0  # minimum timeout of the first batch
STRAGGLER_WINDOW_S = 10.0  # between two searches for a straggler
STACKS_GATHER_S = 1.0  # for the stack traces of all processes, before a job ends
LEADER_EXIT_S = 0.6  # process 0, if it runs the coordination service: until the other processes have exited
OWN_ERROR_S = 0.3  # for this process's error, after another process has exited
SHARED_ERROR_S = 5.0  # the same, if that process exited with an error that occurs on every process
OWN_EXIT_S = 30.0  # the same, if this process is already exiting for the same reason
WATCHDOG_EXIT_S = 10.0  # the main thread, for the watchdog to end the process
LOST_PEER_NAME_S = 2.0  # for the watchdog to identify a lost process: the collective's error names only a socket
EXIT_GRACE_S = 2.0  # for a main thread with nothing to save to stop after a signal
METADATA_TIMEOUT_S = 5.0  # for a response of a metadata server, which runs on the same machine
PREEMPTION_SIGNAL_S = 3.0  # for a step to handle a preemption notice; then the process gets a signal
INPUT_GRACE_S = 3.0  # for the next batch, after a request to stop

# ---- launch ----
LAUNCH_POLL_S = 0.05  # between two polls of the launcher's processes
ERROR_COLLECT_S = 3.0  # after the first failure, for the other processes to report their errors and exit
FAILED_GRACE_S = 0.3  # after that, and a SIGTERM, for them to exit
OUTPUT_DRAIN_S = 5.0  # for the last lines of an exited process; a process that it left behind may hold the pipe
SILENT_PROCESS_S = 2.0  # without a heartbeat: the launcher accepts other processes' reports of a silent process
STACKS_WRITE_S = 0.5  # for a process with a blocked interpreter to write its stack traces
RESTART_FIRST_WAIT_S = 1.0  # before the first restart; the wait doubles
RESTART_LONGEST_WAIT_S = 60.0  # before any restart
POD_GRACE_MARGIN_S = 30  # Kubernetes kills a pod this much after the grace period that spmdkit needs

# ---- in-process elasticity ----
MEMBERS_READY_S = 120.0  # the launcher, for members to leave the previous generation and for new ones to import
LEAVE_STEP_S = 4.0  # the launcher, for a member to leave a step; then it is killed
IDLE_IN_STEP_S = 0.8  # a member in a step that uses no processor for this long is killed
RESIZE_POLL_S = 1.0  # between two polls of the requested number of processes
MEMBERSHIP_POLL_S = 0.02  # between two polls of the membership file
MEMBERSHIP_NOTICE_S = 5.0  # a process with an error that indicates a lost peer, for the launcher's update
MEMBERSHIP_UPDATE_S = 600.0  # a process between two generations: the launcher decides before
DISCONNECT_AGAIN_S = 0.2  # between two shutdowns of Gloo's connections: operations in flight may connect again

# ---- data ----
DATA_CLOSE_S = 5.0  # for the thread that reads data, at the end
FINGERPRINT_S = 0.5  # reading rows for the fingerprint of a data source
ROW_RETRY_FIRST_S = 0.1  # before a failed row is read again; the wait doubles
ROW_RETRY_LONGEST_S = 5.0  # before any retry

# ---- drill ----
MATRIX_CELL_S = 240.0  # for a cell of `drill --matrix`: longer is a hang
MATRIX_TOLERANCE_S = 1.0  # added to the timeout in which a cell has to detect its fault
MATRIX_STORE_SAVE_S = 40  # for a save to a store that s3fs retries for 8 s: longer than that
CLOCK_LIBRARY_S = 60  # to compile the library that shifts the clock of a process

# ---- checkpoints ----
DATA_CHECK_POLL_S = 0.2  # between two polls of the digests of other processes
SAVE_POLL_S = 0.1  # between two polls of the background save
SAVE_ABANDON_S = 10.0  # for a save that cannot be committed, since a process died
SAVE_RETRY_S = 1.0  # between two attempts of the last save
SLOW_SAVE_S = 60.0  # a save that takes longer is logged
SAVE_BLOCKED_S = 5.0  # training that waits longer for the previous save is logged
LEASE_RENEW_S = 10.0  # between two renewals of the lease on a bucket
LEASE_STALE_S = 35.0  # without a renewal: the lease is free. More than three renewals
LEASE_POLL_S = 2.0  # between two polls of another run's lease
LEASE_SETTLE_S = 0.5  # after a lease is written, until it is read back to determine the last writer
OWNERSHIP_RECHECK_S = 0.1  # between two reads of the owner of the run directory, which take as long as writing a line

# ---- evaluation, trackers, plan ----
EVALUATOR_POLL_S = 1.0  # between two polls for a new checkpoint
TRACKER_CLOSE_S = 10.0  # for a tracker, at the end of a run
TRACKER_CONNECT_S = 20.0  # for W&B; the process ends no earlier if its service does not respond
TRACKER_UPLOAD_S = 600.0  # for the best checkpoint, at the end of a run
GIT_S = 5.0  # for git to report the commit
PLAN_CLOSE_S = 60.0  # for the plan of the run, at its end
PLAN_WORKER_S = 900  # for a process of `plan --search`
TUNE_LIST_S = 600.0  # for the process that lists the variants of `tune`
TUNE_VARIANT_S = 180.0  # for a variant of `tune`: it is killed then
VERIFY_JOB_S = 600.0  # for a process of `verify`

# ---- parameter server and Horovod ----
SERVER_POLL_S = 0.05  # between two polls of the servers
SERVER_WORKERS_S = 60.0  # for the workers to start: training begins without those that have not
SERVER_START_S = 600.0  # for the servers and the first worker: on a cluster they may wait for a machine
RAY_REGISTER_S = 300  # for a process that Ray has started to connect to it: Ray kills it then, after 60 s by default
ACTOR_REPLY_S = 120.0  # for the result of a remote call; then the call is lost and repeated
RAY_CONNECT_S = 10.0  # to a Ray cluster: Ray itself tries for minutes (2.60)
TRANSPORT_RETRY_S = 0.05  # between two attempts of a call to an unreachable server
WORKER_LONGEST_PAUSE_S = 0.02  # between two requests for parameters that are not available yet
NEGOTIATION_POLL_S = 0.5  # between two checks of a waiting rank for a failed rank
