"""Builds one compiled program from a task and a config: `build(config, task, devices) -> Program`.

Input: a config, a task, devices. Output: a `Program` with the compiled step, its layout, its feeds and its evaluation.
"""
