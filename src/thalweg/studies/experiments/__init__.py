"""Studies of claims that no comparison of training arms decides: experiments, each a function of options and a seed that gives rows.

One file is one experiment: a function under ``@register(name, ...)`` of :mod:`thalweg.studies.experiments.base`.
"""
