"""The functions of `import danlu`: train a recipe, and use a model, from a Python program or a notebook."""
