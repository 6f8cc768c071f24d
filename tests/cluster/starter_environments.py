"""Environments that real starters set, and how each is to be read: a row each, with the variables that are read.

Copied from what they set on this kind of machine (2026-11-22 and 23): Slurm 22.05.8, Open MPI 4.1.4 and 5.0.11,
torchrun of PyTorch 2.13.0, a worker of Ray 2.60; host names and node lists of several nodes are put in. From
documentation and sources: GKE, JobSet 08dfbdf, Kubeflow Trainer 8c0f505, PyTorchJob, TF_CONFIG, SkyPilot.

`later` names an environment that is in docs/development/adding.md only, and how the row is read where its
file is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

LATER_PORT = "*"
"""In an address: whatever port the environment chooses."""


@dataclass(frozen=True)
class Place:
    """What a process should take for its place."""

    num_processes: int = 1
    process_id: int = 0
    coordinator: str | None = None
    by: str | None = None
    notes: tuple[str, ...] = ()  # each is part of one note, in order
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """Exit code 78, with these words."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    name: str
    env: dict[str, str]
    reads: Place | Refused
    later: tuple[str, Place | Refused] | None = None


def ours(num: int, process: int, port: int = 41001) -> dict[str, str]:
    """Returns what `spmdkit launch` sets."""
    return {
        "SPMDKIT_COORDINATOR": f"127.0.0.1:{port}",
        "SPMDKIT_NUM_PROCESSES": str(num),
        "SPMDKIT_PROCESS_ID": str(process),
        "SPMDKIT_ERROR_FILE": f"/tmp/spmdkit-launch-x/error-{process}.json",
    }


ALONE = {"PATH": "/usr/bin", "RANK_BY": "x"}

KUBEFLOW = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}

INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1"}
"""What Kubernetes sets in a pod of an indexed Job."""

JOBSET = INDEXED_JOB | {
    "JOBSET_COORDINATOR": "run-workers-0-0.run",
    "JOBSET_JOB_INDEX": "0",
    "JOBSET_JOBS": "1",
    "JOBSET_PODS": "2",
}

TRAIN_JOB = INDEXED_JOB | {
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:29500",
}

GKE_TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "job-0-0.job,job-0-1.job", "JOB_COMPLETION_INDEX": "1"}

POD_WITHOUT_JOBSET = "jobset is not used (this is pod 1 of an indexed Job"

OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "676855808.0;tcp://192.0.2.2:51829;tcp6://[fd00::2]:36681",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "676855809",
}

TWO_HOSTS = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_num_nodes": "2"}

OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-gpu-node7-1689@1",
}

RAY_WORKER = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "17861"}
RAY_NOTE = "ray is not used (this is a worker of the Ray job 01000000"

SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}


def tf_config(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    """Returns TF_CONFIG of a task of a chief and two workers, or of the cluster that is given."""
    hosts = cluster or {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
    return {"TF_CONFIG": json.dumps({"cluster": hosts, "task": {"type": kind, "index": index}})}


def torchrun(rank: int, size: int = 4, agents: int = 2, **changes: str) -> dict[str, str]:
    """Returns what an agent of torchrun sets for a worker, two on a host."""
    return {
        "GROUP_WORLD_SIZE": str(agents),
        "LOCAL_RANK": str(rank % 2),
        "MASTER_ADDR": "node007",
        "MASTER_PORT": "29513",
        "RANK": str(rank),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
    } | changes


SLURM_JOB = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "4"}
"""What `salloc -n 4 -N 2 command` sets for the command, which runs where `salloc` was typed."""

SLURM_BATCH = SLURM_JOB | {"SLURM_PROCID": "0"}
"""A batch script, before any srun: a process number 0 and a number of tasks, and yet no step."""


def slurm_step(num: int, process: int, step: int = 0, nodes: str = "node[007-008]") -> dict[str, str]:
    """Returns what `srun -n NUM` sets for a task."""
    return SLURM_BATCH | {
        "SLURM_NTASKS": str(num),
        "SLURM_PROCID": str(process),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": str(num),
    }


SALLOC_SHELL = slurm_step(1, 0, 4294967290, "node007") | {"SLURM_NTASKS": "4"}
"""The shell of `salloc -n 4` where it is opened on the first host: a step of one task, with the tasks of the job."""

NOT_IN_A_STEP = "one process: this is inside the Slurm job 2 of 4 tasks, but not in one of its steps. To use the tasks"

ROWS = [
    Row("torchrun, static, two hosts", torchrun(3), Place(4, 3, "node007:62282", "torchrun")),
    Row(
        "torchrun --standalone --nproc-per-node 2",
        torchrun(1, 2, 1, MASTER_ADDR="localhost", MASTER_PORT="39849"),
        Place(2, 1, "localhost:64426", "torchrun"),
    ),
    Row(
        "torchrun in an srun step, one agent a host",
        slurm_step(2, 1) | torchrun(3),
        Place(4, 3, "node007:62282", "torchrun", ("slurm is not used (SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1)",)),
    ),
    Row(
        "torchrun --standalone in a step of four tasks, by mistake",
        slurm_step(4, 2) | torchrun(1, 2, 1),
        Refused(("SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=2", "WORLD_SIZE=2, RANK=1", "{environment: torchrun}")),
    ),
    Row(
        "the DeepSpeed launcher, which keeps no agent at the port",
        {"MASTER_ADDR": "fd00::2", "MASTER_PORT": "29500", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        Place(2, 1, "[fd00::2]:29500", "torchrun"),
    ),
    Row(
        "a PyTorchJob of Kubeflow, python in each pod",
        KUBEFLOW,
        Place(notes=("one process: WORLD_SIZE=3 and RANK=2 are set, but LOCAL_RANK is not. Start it with torchrun",)),
    ),
    Row(
        "torchrun in a PyTorchJob of Kubeflow",
        KUBEFLOW | torchrun(5, 6, 3, MASTER_ADDR="job-master-0"),
        Place(6, 5, "job-master-0:62282", "torchrun"),
    ),
    Row(
        "variables of torchrun without an address",
        torchrun(1, MASTER_ADDR=""),
        Refused(("LOCAL_RANK=1 is set", "MASTER_ADDR=''", "Start it with torchrun")),
    ),
    Row("srun -n 4 on two hosts", slurm_step(4, 3), Place(4, 3, "node007:61442", "slurm")),
    Row(
        "srun -n 2 in an sbatch script, its second step",
        slurm_step(2, 1, 1, "node008"),
        Place(2, 1, "node008:61503", "slurm"),
    ),
    Row("an sbatch script without srun", SLURM_BATCH, Place(notes=(NOT_IN_A_STEP,))),
    Row("the shell that salloc opens on a host, a notebook in it", SALLOC_SHELL, Place(notes=(NOT_IN_A_STEP,))),
    Row(
        "ssh into a host of a job",  # pam_slurm_adopt sets the job alone, github.com/jax-ml/jax/issues/30073
        {"SLURM_JOB_ID": "2", "SSH_CONNECTION": "10.0.0.1 5 10.0.0.7 22"},
        Place(notes=("inside the Slurm job 2, but not in one of its steps",)),
    ),
    Row(
        "a number of processes asked for in an allocation",
        SLURM_BATCH | {"SPMDKIT_NUM_PROCESSES": "4"},
        Refused(
            ("SPMDKIT_NUM_PROCESSES=4 requires several", "inside the Slurm job 2 of 4 tasks", "start it with srun")
        ),
    ),
    Row(
        "a number of processes asked for in a step of so many, at a port of one's own",
        slurm_step(4, 2) | {"SPMDKIT_NUM_PROCESSES": "4", "SPMDKIT_COORDINATOR": "node007:9000"},
        Place(4, 2, "node007:9000", "slurm"),
    ),
    Row(
        "another number of processes asked for in a step",
        slurm_step(4, 2) | {"SPMDKIT_NUM_PROCESSES": "8"},
        Refused(("SPMDKIT_NUM_PROCESSES=8", "slurm has started 4 (SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=2)")),
    ),
    Row(
        "spmdkit launch -n 2 in an sbatch script",
        SLURM_BATCH | ours(2, 1),
        Place(2, 1, "127.0.0.1:41001", "spmdkit", ("slurm is not used (this is inside the Slurm job 2 of 4 tasks",)),
    ),
    Row(
        "mpirun -np 2 inside salloc",
        SLURM_JOB | OPEN_MPI,
        Place(2, 1, "127.0.0.1:62848", "open_mpi", ("slurm is not used (this is inside the Slurm job 2 of 4 tasks",)),
    ),
    Row(
        "mpirun in an sbatch script, on its second host, where a step of Slurm runs mpirun's daemon",
        slurm_step(1, 0, 0, "node008") | OPEN_MPI | TWO_HOSTS,
        Place(2, 1, "192.0.2.2:62848", "open_mpi", ("slurm is not used (SLURM_STEP_NUM_TASKS=1, SLURM_PROCID=0)",)),
    ),
    Row(
        "mpirun -np 2 in a task of a step of four, by mistake",
        slurm_step(4, 2) | OPEN_MPI,
        Refused(
            ("OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1", "SLURM_STEP_NUM_TASKS=4", "{environment: open_mpi}")
        ),
    ),
    Row(
        "a step that lost a variable",
        {k: v for k, v in slurm_step(4, 3).items() if k != "SLURM_PROCID"},
        Refused(("step 0 of the Slurm job 2", "SLURM_PROCID=''", "Start it with srun")),
    ),
    Row("a shell", ALONE, Place()),
    Row("spmdkit launch -n 4", ALONE | ours(4, 3), Place(4, 3, "127.0.0.1:41001", "spmdkit")),
    Row(
        "a starter of one's own on two hosts",
        {
            "SPMDKIT_COORDINATOR": "[fd00::2]:8476",
            "SPMDKIT_NUM_PROCESSES": "2",
            "SPMDKIT_PROCESS_ID": "1",
            "SPMDKIT_DEVICES_PER_PROCESS": "4",
            "SPMDKIT_RENDEZVOUS_TIMEOUT_S": "30",
        },
        Place(2, 1, "[fd00::2]:8476", "spmdkit", extra={"devices_per_process": 4, "rendezvous_timeout_s": 30.0}),
    ),
    Row("devices alone", {"SPMDKIT_DEVICES_PER_PROCESS": "2"}, Place(extra={"devices_per_process": 2})),
    Row(
        "a number of processes and nothing else",
        {"SPMDKIT_NUM_PROCESSES": "4"},
        Refused(
            (
                "SPMDKIT_NUM_PROCESSES=4 requires several",
                "SPMDKIT_COORDINATOR and SPMDKIT_PROCESS_ID are not set",
                "spmdkit launch -n 4",
            )
        ),
    ),
    Row("mpirun -np 2", OPEN_MPI, Place(2, 1, "127.0.0.1:62848", "open_mpi")),
    Row(
        "mpirun on two hosts that have IPv6 alone",
        OPEN_MPI | TWO_HOSTS | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"},
        Place(2, 1, "[fe80::b9b:ac5d]:62880", "open_mpi"),
    ),
    Row("mpirun -np 2 of Open MPI 5", OPEN_MPI_5, Place(2, 1, "127.0.0.1:63129", "open_mpi")),
    Row(
        "mpirun of Open MPI 5 on two hosts",
        OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        Place(2, 1, "gpu-node7:63129", "open_mpi"),
    ),
    Row(
        "an MPI that says neither where its daemon is nor that all are here",
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        Refused(("OMPI_COMM_WORLD_SIZE='2'", "PMIX_NAMESPACE=''", "mpirun -x SPMDKIT_COORDINATOR")),
    ),
    Row(
        "mpirun -n 2 of MPICH",
        {"PMI_SIZE": "2", "PMI_RANK": "1"},
        Refused(("PMI_SIZE='2'", "mpirun -x SPMDKIT_COORDINATOR")),
    ),
    Row("a JobSet of two pods", JOBSET, Place(2, 1, "run-workers-0-0.run:61440", "jobset")),
    Row(
        "a JobSet of three Jobs of two pods",
        JOBSET | {"JOBSET_JOBS": "3", "JOBSET_JOB_INDEX": "2"},
        Place(6, 5, "run-workers-0-0.run:61440", "jobset"),
    ),
    Row(
        "an indexed Job that hands nothing in",
        INDEXED_JOB,
        Place(notes=("one process: this is pod 1 of an indexed Job of Kubernetes without",)),
    ),
    Row(
        "a JobSet with an index beyond its pods",
        JOBSET | {"JOBSET_PODS": "1"},
        Refused(("JOBSET_PODS='1'", "JOB_COMPLETION_INDEX='1'", "parallelism of one Job")),
    ),
    Row(
        "a TrainJob of Kubeflow Trainer, runtime jax-distributed",
        TRAIN_JOB,
        Place(4, 1, "run-node-0-0.run:29500", "kubeflow", (POD_WITHOUT_JOBSET,)),
    ),
    Row(
        "a TrainJob without a trainer section",
        {"JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:29500"},
        Refused(("JAX_NUM_PROCESSES='4'", "JAX_PROCESS_ID=''", "runtimeRef jax-distributed")),
    ),
    Row(
        "a TrainJob on GKE's TPUs, which both say the same",
        TRAIN_JOB | GKE_TPU | {"JAX_NUM_PROCESSES": "2"},
        Place(2, 1, "job-0-0.job:8482", "cloud_tpu", (POD_WITHOUT_JOBSET, "kubeflow is not used (JAX_NUM_PROCESSES=2")),
    ),
    Row(
        "two slices of two TPU hosts on GKE",
        GKE_TPU
        | {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
            "MEGASCALE_COORDINATOR_ADDRESS": "run-slice-0-0.run:8080",
        },
        Place(4, 3, "run-slice-0-0.run:8482", "cloud_tpu", (POD_WITHOUT_JOBSET,)),
    ),
    Row(
        "two slices without the address of the first",
        GKE_TPU | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"},
        Refused(("MEGASCALE_NUM_SLICES='2'", "MEGASCALE_COORDINATOR_ADDRESS=''", "GKE sets them")),
    ),
    Row(
        "a Cloud TPU slice of four hosts",
        {
            "TPU_WORKER_ID": "2",
            "TPU_PROCESS_ADDRESSES": "10.164.0.2:8471,10.164.0.3:8471,10.164.0.4:8471,10.164.0.5:8471",
        },
        Place(4, 2, "10.164.0.2:8482", "cloud_tpu"),
    ),
    Row(
        "a notebook with a TPU of its own",
        {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        Place(by="cloud_tpu"),
    ),
    Row("TF_CONFIG of two workers and a chief", tf_config("worker", 1), Place(3, 2, "a:2222", "tf_config")),
    Row("the chief of it", tf_config("chief", 0), Place(3, 0, "a:2222", "tf_config")),
    Row("TF_CONFIG of workers alone", tf_config("worker", 1, worker=["b:1", "c:1"]), Place(2, 1, "b:1", "tf_config")),
    Row("its evaluator, which is alone", tf_config("evaluator", 0), Place(by="tf_config", extra={"role": "evaluator"})),
    Row(
        "its parameter server",
        tf_config("ps", 0, chief=["a:2222"], ps=["d:2222"]),
        Refused(("task ps 0 of TF_CONFIG", "every process of spmdkit trains", "fsdp: -1")),
    ),
    Row(
        "a task that the cluster does not have",
        tf_config("worker", 2),
        Refused(("task worker 2", "'worker': 2", "counted from 0")),
    ),
    Row("an empty TF_CONFIG", {"TF_CONFIG": "{}"}, Place()),
    Row("TF_CONFIG of one worker without a cluster", {"TF_CONFIG": '{"cluster": {}, "task": {"index": 0}}'}, Place()),
    Row(
        "a second worker without a cluster",
        {"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'},
        Refused(("its cluster has no tasks that train",)),
    ),
    Row(
        "TF_CONFIG that is no JSON", {"TF_CONFIG": "{cluster"}, Refused(("TF_CONFIG is set", "cannot be read", "JSON"))
    ),
    Row(
        "TF_CONFIG without a port",
        tf_config("worker", 0, worker=["b", "c:1"]),
        Refused(("'b' of TF_CONFIG is no host:port", "For example")),
    ),
    Row(
        "a worker of Ray",  # Ray itself sets no rank for a plain actor
        RAY_WORKER,
        Place(notes=("one process: this is a worker of the Ray job 01000000, and Ray does not number processes.",)),
    ),
    Row(
        "a driver of Ray, as `ray job submit` starts it",
        {"RAY_JOB_ID": "02000000", "RAY_ADDRESS": "10.0.0.2:6379"},
        Place(notes=("one process: this is a driver of the Ray job 02000000",)),
    ),
    Row(
        "a worker of ray.train's torch backend",
        RAY_WORKER
        | {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "41003"},
        Place(2, 1, "10.0.0.2:41003", "torchrun", (RAY_NOTE,)),
    ),
    Row("a node of SkyPilot", SKYPILOT, Place(), later=("skypilot", Place(2, 1, f"10.0.0.4:{LATER_PORT}", "skypilot"))),
    Row(
        "spmdkit launch on a node of SkyPilot",
        SKYPILOT | ours(2, 1),
        Place(2, 1, "127.0.0.1:41001", "spmdkit"),
        later=("skypilot", Place(2, 1, "127.0.0.1:41001", "spmdkit", ("skypilot is not used",))),
    ),
]
