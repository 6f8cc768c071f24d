"""The check that sharding a task over a mesh does not change its results.

Input: a config and its task, or a user-written step (`sk.verify_step`), and the meshes to compare with one device.
Output: a report with the errors on each mesh, the mutants caught, and the first line that differs.
"""
