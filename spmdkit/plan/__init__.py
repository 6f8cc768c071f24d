"""The cost of a compiled step before it runs: bytes sent, memory, time, and avoidable costs."""
