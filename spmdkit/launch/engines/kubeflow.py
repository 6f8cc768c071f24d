"""Kubeflow Trainer: a TrainJob of the runtime `jax-distributed`, which starts one pod per process with JAX's three
variables.

The pods read their rank from these variables (cluster/environments/kubeflow.py). The runtime controls restarts. Its
JobSet has no failure policy: a failed pod ends the job, also with 42. To resume, apply the manifest again or use `--on
kubernetes`. Source: kubeflow/trainer 8c0f505, manifests/base/runtimes/jax_distributed.yaml, docs/user-guides/jax.md.
"""

from __future__ import annotations

from spmdkit.errors import ConfigError
from spmdkit.launch.engines import pods
from spmdkit.launch.engines.base import ClusterJob, Option, Rendered

OPTIONS = {**pods.OPTIONS, "runtime": Option("jax-distributed", "ClusterTrainingRuntime to use")}


TEMPLATE = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: $metadata
spec:
  runtimeRef: {name: $runtime}
  trainer:
    image: $image
    command: $shell
    numNodes: $num
    resourcesPerNode: $resources
"""

VOLUME = """
  runtimePatches:
  - manager: spmdkit.dev/launch
    trainingRuntimeSpec:
      template:
        spec:
          replicatedJobs:
          - name: node
            template: {spec: {template: {spec: {volumes: $volumes, containers: [{name: node, volumeMounts: $mounts}]}}}}
"""


def render(job: ClusterJob) -> Rendered:
    """Returns a TrainJob and the `kubectl apply` command for it.

    Raises: ConfigError if restarts are requested: the runtime controls them.
    """
    if job.max_restarts:
        raise ConfigError(
            f"--max-restarts {job.max_restarts} with --on kubeflow: the runtime {job.options['runtime']} decides about "
            "restarts, and has none. Leave it out, or use --on kubernetes, which restarts its JobSet."
        )
    return pods.rendered(
        job,
        TEMPLATE + (VOLUME if job.options["volume"] else ""),
        f"{job.num_processes} pods, one process each. The runtime sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
        "JAX_PROCESS_ID.",
        "Kubeflow Trainer in the cluster",
        num=job.num_processes,
        # The runtime's container has a different working directory: the shell changes to the project's folder.
        shell=["sh", "-c", 'cd "$0" && exec "$@"', job.options["folder"], *pods.words(job)],
        resources=pods.resources(job),
    )
