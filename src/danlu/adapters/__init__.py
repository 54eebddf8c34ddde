"""Adapters: few trained parameters on a frozen model, in slots that the model leaves open for them."""
