"""Studies whose arms are edits of a given model: the same documents under every edit, each beside its matched no-op.

A plan with a table ``[subject]`` is of this kind. Check, lock, rule and report are those of :mod:`thalweg.studies`; a unit is a document.
"""
