"""Eight fake CPU devices, strict dtype promotion where our code runs, and no test that waits for ever."""

import faulthandler
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("NPROC", str(4 * 8 + (os.cpu_count() or 1)))  # see spmdkit/cluster/join.py

import jax

jax.config.update("jax_num_cpu_devices", 8)
faulthandler.enable()
