"""Rows to tokens: reading, rendering with reasons, caching, packing, order."""
