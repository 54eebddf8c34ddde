"""Quantizers of a matrix by what calibration has seen of its inputs: nearest, GPTQ, AWQ; and SmoothQuant's factors."""
