"""Environments that real starters set, and how each is to be read: a row each.

Copied on 2026-11-22 from what they set on this kind of machine (only variables that some reader could look at are kept): Slurm 22.05.8 (srun, sbatch, salloc
with and without `LaunchParameters=use_interactive_step`), Open MPI 4.1.4, torchrun of PyTorch 2.13.0; host names and node lists of several nodes are
put in. From documentation and sources: GKE and JobSet (jax/_src/clusters/{cloud_tpu,k8s}_cluster.py), PyTorchJob (Lightning's KubeflowEnvironment),
TF_CONFIG (tensorflow.org, TFConfigClusterResolver), Ray.

`reads` is how the row is read now. `later` names a dialect that does not exist yet, and how the row is read once its file is there: a new dialect is one
file, and the row that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LATER_PORT = "*"
"""In an address of a dialect that is still to be written: whatever port it chooses."""


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


ALONE = {"PATH": "/usr/bin", "HOME": "/root", "HOSTNAME": "vm", "RANK_BY": "x"}

KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
    "PYTHONUNBUFFERED": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "auto",
}

GKE_TPU = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "job-0-0.job,job-0-1.job",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "JOB_COMPLETION_INDEX": "1",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "676855809",
    "OMPI_MCA_orte_hnp_uri": "676855808.0;tcp://192.0.2.2:51829;tcp6://[fd00::2]:36681",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "676855809",
    "PMIX_RANK": "1",
}


def torchrun(rank: int, size: int = 4, agents: int = 2, **changes: str) -> dict[str, str]:
    """Returns what an agent of torchrun sets for a worker, two on a host."""
    return {
        "GROUP_RANK": str(rank // 2),
        "GROUP_WORLD_SIZE": str(agents),
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node007",
        "MASTER_PORT": "29513",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "WORLD_SIZE": str(size),
    } | changes


SLURM_JOB = {
    "SLURM_CLUSTER_NAME": "one",
    "SLURM_JOBID": "2",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NAME": "job.sh",
    "SLURM_JOB_NODELIST": "node[007-008]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[007-008]",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_SUBMIT_DIR": "/home/u",
    "SLURM_SUBMIT_HOST": "login",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
"""What `salloc -n 4 -N 2 command` sets for the command, which runs where `salloc` was typed."""

SLURM_BATCH = SLURM_JOB | {
    "SLURMD_NODENAME": "node007",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASK_PID": "17216",
}
"""A batch script, before any srun: a process number 0 and a number of tasks, and yet no step."""


def slurm_step(num: int, process: int, step: int = 0, nodes: str = "node[007-008]") -> dict[str, str]:
    """Returns what `srun -n NUM` sets for a task."""
    return SLURM_BATCH | {
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
        "SLURM_LOCALID": str(process % 2),
        "SLURM_NPROCS": str(num),
        "SLURM_NTASKS": str(num),
        "SLURM_PROCID": str(process),
        "SLURM_SRUN_COMM_HOST": "10.0.0.7",
        "SLURM_SRUN_COMM_PORT": "41177",
        "SLURM_STEPID": str(step),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_LAUNCHER_PORT": "41177",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": str(num),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }


SALLOC_SHELL = slurm_step(1, 0, 4294967290, "node007") | {
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PTY_PORT": "45303",
}
"""The shell of `salloc -n 4` where it is opened on the first host: a step of one task, with the tasks of the job."""

NOT_IN_A_STEP = "one process: this is inside the Slurm job 2 of 4 tasks, and not in a step of it. Start it with srun"

ROWS = [
    Row("torchrun, static, two hosts", torchrun(3), Place(4, 3, "node007:62282", "torchrun")),
    Row(
        "torchrun --standalone --nproc-per-node 2",
        torchrun(
            1,
            2,
            1,
            MASTER_ADDR="localhost",
            MASTER_PORT="39849",
            TORCHELASTIC_RUN_ID="2ddbc21b-f336-46c1-a7ca-2d7b2c554e70",
        ),
        Place(2, 1, "localhost:64426", "torchrun"),
    ),
    Row(
        "torchrun, elastic, after a restart",
        torchrun(
            0,
            2,
            1,
            MASTER_PORT="35969",
            TORCHELASTIC_RUN_ID="job7",
            TORCHELASTIC_RESTART_COUNT="2",
            TORCHELASTIC_MAX_RESTARTS="3",
        ),
        Place(2, 0, "node007:64642", "torchrun"),
    ),
    Row("torchrun --nproc-per-node 1 on one host", torchrun(0, 1, 1, LOCAL_WORLD_SIZE="1"), Place(by="torchrun")),
    Row(
        "torchrun in an srun step, one agent a host",
        slurm_step(2, 1) | torchrun(3),
        Place(4, 3, "node007:62282", "torchrun", ("slurm is not used (SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1)",)),
    ),
    Row(
        "torchrun --standalone in a step of four tasks, by mistake",
        slurm_step(4, 2) | torchrun(1, 2, 1),
        Refused(("SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=2", "WORLD_SIZE=2, RANK=1", "{dialect: torchrun}")),
    ),
    Row(
        "torchrun in an sbatch script",
        SLURM_BATCH | torchrun(0, 2, 1),
        Place(2, 0, "node007:62282", "torchrun", ("slurm is not used (this is inside the Slurm job 2",)),
    ),
    Row(
        "the DeepSpeed launcher, which keeps no agent at the port",
        {
            "MASTER_ADDR": "fd00::2",
            "MASTER_PORT": "29500",
            "RANK": "1",
            "LOCAL_RANK": "1",
            "LOCAL_SIZE": "2",
            "WORLD_SIZE": "2",
            "CROSS_RANK": "0",
        },
        Place(2, 1, "[fd00::2]:29500", "torchrun"),
    ),
    Row(
        "a PyTorchJob of Kubeflow, python in each pod",
        KUBEFLOW,
        Place(notes=("one process: WORLD_SIZE=3 and RANK=2 are set, and LOCAL_RANK is not. Start it with torchrun",)),
        later=("kubeflow", Place(3, 2, f"job-master-0:{LATER_PORT}", "kubeflow", ("torchrun is not used",))),
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
    Row("srun -n 1 --pty bash", slurm_step(1, 0, 0, "node007"), Place(by="slurm")),
    Row("an sbatch script without srun", SLURM_BATCH, Place(notes=(NOT_IN_A_STEP,))),
    Row("salloc -n 4 python", SLURM_JOB, Place(notes=(NOT_IN_A_STEP,))),
    Row("the shell that salloc opens on a host, a notebook in it", SALLOC_SHELL, Place(notes=(NOT_IN_A_STEP,))),
    Row(
        "ssh into a host of a job",  # pam_slurm_adopt sets the job alone, github.com/jax-ml/jax/issues/30073
        {"SLURM_JOB_ID": "2", "SSH_CONNECTION": "10.0.0.1 5 10.0.0.7 22"},
        Place(notes=("inside the Slurm job 2, and not in a step of it",)),
    ),
    Row(
        "a number of processes asked for in an allocation",
        SLURM_BATCH | {"SPMDKIT_NUM_PROCESSES": "4"},
        Refused(
            ("SPMDKIT_NUM_PROCESSES=4 asks for several", "inside the Slurm job 2 of 4 tasks", "Start it with srun")
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
        "spmdkit launch -n 2 in an srun step of one task",
        slurm_step(1, 0) | ours(2, 1),
        Place(2, 1, "127.0.0.1:41001", "spmdkit", ("slurm is not used (SLURM_STEP_NUM_TASKS=1, SLURM_PROCID=0)",)),
    ),
    Row(
        "mpirun -np 2 inside salloc",
        SLURM_JOB | OPEN_MPI,
        Place(notes=(NOT_IN_A_STEP,)),
        later=("open_mpi", Place(2, 1, f"192.0.2.2:{LATER_PORT}", "open_mpi", ("slurm is not used",))),
    ),
    Row(
        "a step that lost a variable",
        {k: v for k, v in slurm_step(4, 3).items() if k != "SLURM_PROCID"},
        Refused(("step 0 of the Slurm job 2", "SLURM_PROCID=''", "Start it with srun")),
    ),
    Row("nothing", {}, Place()),
    Row("a shell", ALONE, Place()),
    Row("spmdkit launch -n 4", ALONE | ours(4, 3), Place(4, 3, "127.0.0.1:41001", "spmdkit")),
    Row("spmdkit launch -n 1", ALONE | ours(1, 0), Place(by="spmdkit")),
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
                "SPMDKIT_NUM_PROCESSES=4 asks for several",
                "SPMDKIT_COORDINATOR and SPMDKIT_PROCESS_ID are not set",
                "spmdkit launch -n 4",
            )
        ),
    ),
    Row(
        "mpirun -np 2",
        OPEN_MPI,
        Place(),
        later=("open_mpi", Place(2, 1, f"192.0.2.2:{LATER_PORT}", "open_mpi")),
    ),
    Row(
        "a JobSet of two TPU hosts on GKE",
        GKE_TPU | {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
        Place(),
        later=("jobset", Place(2, 1, f"job-0-0.job:{LATER_PORT}", "jobset")),
    ),
    Row(
        "a Cloud TPU slice of four hosts",
        {
            "TPU_WORKER_ID": "2",
            "TPU_PROCESS_ADDRESSES": "10.164.0.2:8471,10.164.0.3:8471,10.164.0.4:8471,10.164.0.5:8471",
            "TPU_ACCELERATOR_TYPE": "v4-32",
        },
        Place(),
        later=("cloud_tpu", Place(4, 2, f"10.164.0.2:{LATER_PORT}", "cloud_tpu")),
    ),
    Row(
        "TF_CONFIG of two workers and a chief",
        {
            "TF_CONFIG": '{"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type": "worker", "index": 1}}'
        },
        Place(),
        later=("tf_config", Place(3, 2, f"a:{LATER_PORT}", "tf_config")),
    ),
    Row(
        "a worker of Ray Train",  # Ray itself sets no rank for a plain actor; Train's torch backend sets torch's
        {"RAY_JOB_ID": "01000000", "RAY_ADDRESS": "10.0.0.2:6379", "RAY_CLIENT_MODE": "0"},
        Place(),
        later=("ray", Place()),
    ),
    Row(
        "spmdkit launch in an MPI job",
        OPEN_MPI | ours(2, 1),
        Place(2, 1, "127.0.0.1:41001", "spmdkit"),
        later=("open_mpi", Place(2, 1, "127.0.0.1:41001", "spmdkit", ("open_mpi is not used",))),
    ),
]
