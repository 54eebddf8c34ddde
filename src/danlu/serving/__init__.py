"""`danlu serve`: the engine behind an API as OpenAI has it."""
