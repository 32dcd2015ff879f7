"""Makes ``probe_subjects``, and the tiny families of the capture tests, importable for the tests beside it.

Test modules are imported by path and have no package.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "capture"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny model with the tokenizer that the package ships, as the command opens it."""
    import probe_subjects as subjects
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from thalweg.capture.quiet import hushed
    from thalweg.data.tasks.austen import shipped_tokenizer

    place = tmp_path_factory.mktemp("model") / "llama"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(shipped_tokenizer().library_json()))
    with hushed():
        subjects.llama(vocab_size=tokenizer.vocab_size).save_pretrained(place)
        tokenizer.save_pretrained(place)
    return place
