"""Scripts that run in the environment of another library. Nothing here is imported, and nothing here imports thalweg."""
