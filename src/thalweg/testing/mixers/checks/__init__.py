"""The checks of mixers, grouped by theme. A check takes a MixerSubject and raises, or returns what it measured; its docstring is its claim."""
