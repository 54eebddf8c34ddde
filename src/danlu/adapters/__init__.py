"""Adapters: few trained parameters beside a frozen model, in slots that the model leaves open for them."""
