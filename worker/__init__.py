"""Jobs on a queue: the same steps as `reshard.pipeline`, one unit of work at a time under a lease."""
