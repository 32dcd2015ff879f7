"""The checks of the battery, grouped by theme. A check takes a Subject and raises, or returns nothing; its docstring is what it claims."""
