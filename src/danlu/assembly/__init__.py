"""Parts of layer 1 put together: a base in the type or the few bits that are wanted, with adapters in its slots."""
