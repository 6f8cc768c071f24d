"""The process that runs JAX's coordination service, separate from the processes of a job."""

from spmdkit.cluster.service.process import ServiceProcess, reserve_port

__all__ = ["ServiceProcess", "reserve_port"]
