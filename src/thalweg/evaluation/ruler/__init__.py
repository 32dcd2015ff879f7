"""Long-context tasks in the style of RULER, made here from seeds: any length, no download.

The kinds of task, their sizes and the score follow Hsieh et al. 2024, RULER, arXiv 2404.06654; every word of the prompts is our own, so
scores are comparable with each other and not with published ones. The two question-answering tasks of RULER need texts that cannot be made
and are left out.
"""

from thalweg.evaluation.ruler.run import aggregate, recall, run
from thalweg.evaluation.ruler.sample import Sample
from thalweg.evaluation.ruler.tasks import FAMILIES, TASKS, names_of, samples

__all__ = ["FAMILIES", "TASKS", "Sample", "aggregate", "names_of", "recall", "run", "samples"]
