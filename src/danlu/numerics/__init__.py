"""How numbers are stored and multiplied: loss scaling of fp16, weights in 4 and 8 bits, batch-invariant products."""
