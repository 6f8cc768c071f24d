"""The asynchronous parameter server: servers hold shards of the parameters and of the optimizer's state, workers send
them gradients.

    worker:  w, v <- pull;   g <- dL(w; batch)/dw;   push(g, v)
    server:  staleness = updates applied - v;   w <- w + optimizer(g), as gradients come

For what one SPMD program cannot do: workers of other speeds, workers that die, come back or join. Otherwise use a mesh.

partition.py which leaf lives where · messages.py what is said · server.py what a server does with a push ·
completed_batches.py which batches it has taken · model_state.py what becomes of a model's own state · gradient.py the
worker's compiled step · worker.py its loop · coordinator.py installs, watches, takes snapshots · transport.py how they
reach each other · threads.py in one process · actors.py on Ray.

Wire: a worker pulls and pushes each parameter once a gradient, 2 * 4 bytes a parameter.
Source: Dean et al., "Large Scale Distributed Deep Networks" (2012), Downpour SGD; Li et al., "Scaling Distributed
Machine Learning with the Parameter Server" (2014).
"""
