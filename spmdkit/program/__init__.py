"""Where everything meets: `build(config, task, devices) -> Program`, and what it is made of."""
