"""FLOPs, memory, traffic and pipeline schedules in closed form, without torch."""
