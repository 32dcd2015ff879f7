"""Registration with the Auto classes of transformers, in either import order, without importing transformers or torch.

``AutoConfig`` must know our config class as soon as its module exists. If it is there already, the class is registered now; if not,
a finder waits for that one module and registers it the moment it has run. The model class follows when the first config is made: while
transformers is still importing its own modules, importing a model class would run in a circle.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys

AUTO_CONFIG = "transformers.models.auto.configuration_auto"


def install() -> None:
    """Register now or as soon as it is possible; calling it again does nothing."""
    module = sys.modules.get(AUTO_CONFIG)
    if module is not None and hasattr(module, "AutoConfig"):
        register(module)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def register(module) -> None:
    from thalweg.models.hf_config import ThalwegConfig, ThalwegEncoderConfig

    for config in (ThalwegConfig, ThalwegEncoderConfig):
        module.AutoConfig.register(config.model_type, config, exist_ok=True)


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds the one module as everybody else would, and has it register our classes once it has run."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(importlib.abc.Loader):
    """Runs the module with its own loader, gives that loader back to it, then registers."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        register(module)
