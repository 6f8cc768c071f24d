"""The asynchronous parameter server: servers hold shards of the parameters and the optimizer state, and workers send
them gradients.

    worker:  w, v <- pull;   g <- dL(w; batch)/dw;   push(g, v)
    server: staleness = updates applied - v; w <- w + optimizer(g), as gradients arrive

Use it where one SPMD program does not work: workers of different speeds, or workers that fail, return or join.
Otherwise use a mesh.

partition.py assigns leaves to servers · messages.py requests and responses · server.py applies pushes ·
completed_batches.py the batches that a server has completed · gradient.py the worker's compiled step · worker.py the
worker's loop · coordinator.py initializes, monitors, takes snapshots · transport.py interface · threads.py in one
process · actors.py on Ray.

Input: a config and a task. Output: the trained state. Wire: a worker pulls and pushes each parameter once per
gradient, 2 * 4 bytes per parameter.
Source: Dean et al., "Large Scale Distributed Deep Networks" (2012), Downpour SGD; Li et al., "Scaling Distributed
Machine Learning with the Parameter Server" (2014).
"""
