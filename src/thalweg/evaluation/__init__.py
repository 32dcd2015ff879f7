"""What a model can do: perplexity, choices, long-context tasks made here, lm-eval; an edit always beside its matched no-op.

Sits above models and data and below training. It knows no edit: an edit is a context that somebody else enters.
"""

from thalweg.evaluation import lm_eval, ruler
from thalweg.evaluation.choices import choices, read_choices
from thalweg.evaluation.documents import Document, Documents, documents_of
from thalweg.evaluation.embeddings import embed, embedding_similarity
from thalweg.evaluation.masked import masked_loss, pseudo_perplexity
from thalweg.evaluation.paired import Difference, Edit, Outcome, differences, evaluate_edits
from thalweg.evaluation.perplexity import Perplexity, perplexity
from thalweg.evaluation.scores import Metric, Scores

__all__ = [
    "Difference",
    "Document",
    "Documents",
    "Edit",
    "Metric",
    "Outcome",
    "Perplexity",
    "Scores",
    "choices",
    "differences",
    "documents_of",
    "embed",
    "embedding_similarity",
    "evaluate_edits",
    "lm_eval",
    "masked_loss",
    "perplexity",
    "pseudo_perplexity",
    "read_choices",
    "ruler",
]
