"""The check that sharding a task over a mesh does not change its results.

In: a config and its task, or a hand-written step (`sk.verify_step`), and the meshes to compare with one device.
Out: a report with the errors of each mesh, the mutants that were caught, and the first line that differs.
"""
