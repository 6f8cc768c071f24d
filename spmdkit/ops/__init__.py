"""Parts of models with defined sharding: attention, mixture of experts, pipeline, tensor-parallel products, the
vocabulary, remat.

Enters: global arrays, or shards inside of `sk.manual`. Leaves: arrays with the documented sharding, on every mesh.
"""
