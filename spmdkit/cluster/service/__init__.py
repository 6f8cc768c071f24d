"""The process that holds JAX's coordination service, beside the processes of a job."""

from spmdkit.cluster.service.process import ServiceProcess, reserve_port

__all__ = ["ServiceProcess", "reserve_port"]
