"""Data made by models: instructions, answers, marks and pairs from seeds or documents, each request asked once."""
