"""A task and a config become one compiled program: `build(config, task, devices) -> Program`.

Enters: a config, a task, devices. Leaves: a `Program` with the compiled step, its layout, its feeds and its evaluation.
"""
