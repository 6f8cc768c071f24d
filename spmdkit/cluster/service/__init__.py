"""The process that holds JAX's coordination service, beside the processes of a job."""

from spmdkit.cluster.service.process import HEARTBEAT_S, SHUTDOWN_S, ServiceProcess, reserve_port

__all__ = ["HEARTBEAT_S", "SHUTDOWN_S", "ServiceProcess", "reserve_port"]
