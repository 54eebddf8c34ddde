"""Models put together from parts: a quantized base with adapters, a decoder placed on processes, expected memory."""
