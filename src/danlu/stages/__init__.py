"""The stages of training: a table of their readers, builders and objectives, and the models that they train."""
