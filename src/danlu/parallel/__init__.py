"""The layout of a run, its process groups, and how tensors and batches are cut, copied or sharded among them."""
