"""``import thalweg`` is light, and the Auto classes know our models whichever of thalweg and transformers comes first."""

import subprocess
import sys

import pytest
import torch

from thalweg.models import DecoderConfig, ThalwegConfig, ThalwegForCausalLM

LOAD = """
assert AutoConfig.from_pretrained(PATH).model_type == "thalweg"
assert type(AutoModelForCausalLM.from_pretrained(PATH)).__name__ == "ThalwegForCausalLM"
"""
UNTOUCHED = """
import inspect
import transformers.utils
import transformers.models.auto.configuration_auto as auto
assert not any(type(finder).__module__ == "thalweg._auto" for finder in sys.meta_path)
assert type(auto.__spec__.loader) is type(transformers.utils.__spec__.loader) is type(auto.__loader__)
assert "class AutoConfig" in inspect.getsource(auto)
"""
ORDERS = {
    "thalweg first": "import thalweg\nfrom transformers import AutoConfig, AutoModelForCausalLM" + LOAD + UNTOUCHED,
    "transformers first": "from transformers import AutoConfig, AutoModelForCausalLM\nimport thalweg" + LOAD,
    # Importing a model class imports the Auto classes half-way: registering the model there would run in a circle.
    "a model class in between": (
        "import thalweg\nfrom transformers import LlamaForCausalLM\nfrom transformers import AutoConfig, AutoModelForCausalLM"
        + LOAD
    ),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """All orders at once, each in its own process: importing transformers takes seconds."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    ThalwegForCausalLM(ThalwegConfig.of(DecoderConfig(vocab_size=8, width=4, depth=1, heads=1))).save_pretrained(path)
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"import sys\nPATH = {str(path)!r}\n{code}"], stderr=subprocess.PIPE, text=True
        )
        for name, code in ORDERS.items()
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("order", ORDERS)
def test_either_import_order(running, order):
    _, errors = running[order].communicate(timeout=120)
    assert running[order].returncode == 0, errors


def test_importing_the_package_loads_neither_torch_nor_transformers():
    code = "import sys, thalweg; dir(thalweg); print(sorted({'torch', 'transformers'} & set(sys.modules)), thalweg.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")


def test_public_names_load_when_used():
    import thalweg
    import thalweg.models

    assert set(dir(thalweg)) == set(thalweg.__all__)
    assert thalweg.connections.names() and thalweg.models.Decoder.__name__ == "Decoder"
    for module in (thalweg, thalweg.models):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing
    assert all(hasattr(thalweg.models, name) for name in dir(thalweg.models))
