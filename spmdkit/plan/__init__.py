"""What a compiled step costs: bytes on the wire, memory, time, and what is wrong with it, before it runs."""
