"""Hot operations shared by both stairs of the house; imports nothing of thalweg above this floor."""
