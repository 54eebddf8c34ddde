"""Data sets that are curated or synthesized: shards, kept work, ledgers, and the folder that a recipe trains on."""
