"""danlu (丹炉): train large language models from one recipe, on a laptop CPU or a cluster."""

__version__ = "0.1.0"
