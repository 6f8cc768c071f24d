"""The process that runs JAX's coordination service, separate from the processes of a job, and their connections."""

from spmdkit.cluster.service.connection import ServiceConnection, bypass_proxies
from spmdkit.cluster.service.process import ServiceProcess, reserve_port

__all__ = ["ServiceConnection", "ServiceProcess", "bypass_proxies", "reserve_port"]
