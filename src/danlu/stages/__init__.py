"""Language models in a stage: how rows become packs, and how a decoder is placed, learns and is written."""
