"""Layout, groups of processes, and what is cut, copied or sharded among them."""
