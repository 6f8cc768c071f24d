"""Model building blocks with a defined sharding: attention, mixture of experts, pipeline, tensor-parallel products,
vocabulary, remat.

Inputs: global arrays, or shards inside `sk.manual`. Outputs: arrays with the documented sharding, on every mesh.
"""
