"""Run a compressor of another library in its own environment on a model of this one, and take over what it made."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from thalweg import config
from thalweg.capture.layers import Layers
from thalweg.capture.limits import longest_of, vocabulary_of
from thalweg.capture.locating import locate
from thalweg.capture.saving import save_folder
from thalweg.capture.weights import check_finite
from thalweg.compression.adapters.libraries import Library, bits_of, external
from thalweg.compression.calibration import Calibration, Samples
from thalweg.compression.compressing import Compressed, finished, row_of
from thalweg.compression.compressors.base import Made
from thalweg.compression.targets import chosen_sites, layers_of, targets_of
from thalweg.config import checked_path
from thalweg.errors import CheckpointError, InputError
from thalweg.ops.precision import wide
from thalweg.records import provenance

IN_THEIR_SCALING = "errors of single matrices are in the library's own scaling: it moved scales between maps and norms"
SCRIPTS = Path(__file__).parent / "scripts"


def compress_outside(
    model: nn.Module,
    method: str,
    *,
    environment: str | Path | None,
    calibration: Calibration | Samples | None = None,
    layers: Layers = None,
    skip: Layers = None,
    sites: Any = None,
    source: str = "",
    tell: Callable[[str], Any] | None = None,
    **options: Any,
) -> Compressed:
    """Compress ``model`` in place by a library, as :func:`thalweg.compression.compress` does by ours.

    method: ``llmcompressor:wanda`` and the like. environment: the Python of an environment that has the library. The model is written to
    a temporary folder, compressed there in a process of its own, and its changed weights, dense, take the place of the old ones; norms too,
    where the library folds scales into them. tell: gets a line before the process starts.
    Raises: UnknownNameError, InputError: no environment, a model that is none of transformers, or what the library said, in one line.
    """
    library, name, found = external(method)
    made = config.build(found.options, options, where=method)
    python = check_environment(library, environment)
    located = locate(model)
    if located.found_by == "own" or not located.causal or not hasattr(model, "save_pretrained"):
        raise InputError(
            f"{method} opens decoders of transformers, got {located.family}; our own compressors take any model"
        )
    check_finite(model, source or located.family)
    if calibration is not None:
        calibration = Calibration.of(calibration, vocabulary_of(model), longest_of(model))
    elif found.calibrated:
        raise InputError(
            f"{method} needs to see text: give calibration=, a list of lists of token numbers (thalweg compress: --text FILE)"
        )
    chosen, wanted = layers_of(located.depth, layers, skip), chosen_sites(sites)
    targets = targets_of(located, chosen, wanted)
    inside = {target.name for target in targets}
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in inside]
    before = {target.name: wide(target.weight.detach()).clone() for target in targets}
    with tempfile.TemporaryDirectory(prefix="thalweg-") as folder:
        where = Path(folder)
        save_folder(model, where / "model")
        (where / "samples.json").write_text(json.dumps(calibration.samples if calibration else []), encoding="utf-8")
        (where / "output").mkdir()
        job = {
            "model": str(where / "model"),
            "output": str(where / "output"),
            "samples": str(where / "samples.json"),
            "method": name,
            "options": config.to_plain(made),
            "ignore": ignored,
            "threads": torch.get_num_threads(),
        }
        (where / "job.json").write_text(json.dumps(job), encoding="utf-8")
        if tell is not None:
            tell(f"{method}: in a process of {python}, on a copy of the model in {folder}")
        _run([str(python), str(SCRIPTS / library.script), str(where / "job.json")], method, where)
        result = json.loads((where / "output" / "result.json").read_text(encoding="utf-8"))
        weights = load_file(where / "output" / "weights.safetensors")
    _take_over(model, weights, method)
    rows = []
    for target in targets:
        after = wide(target.weight.detach())
        row = row_of(target, before[target.name], after, Made(after, bits_of(found, made, after)), None)
        if (error := result["errors"].get(target.name)) is not None:
            row = config.build(
                type(row), {**config.to_plain(row), "mean_square_error": error[0], "relative_error": error[1]}
            )
        rows.append(row)
    facts = {"method": method, "options": config.to_plain(made), "source": source or located.family}
    facts |= {
        "calibration": None if calibration is None else calibration.plain(),
        "provenance": {**provenance.collect(), "library": result["versions"]},
    }
    notes = (IN_THEIR_SCALING,) if result["errors"] else ()
    return finished(model, located, targets, rows, chosen, wanted, facts, notes)


def check_environment(library: Library, environment: str | Path | None) -> Path:
    """The Python of an environment that has the library. Raises: InputError."""
    if environment is None:
        raise InputError(f"{library.imports} lives in an environment of its own; make one: {library.install}")
    path = checked_path(environment, expand=True)
    path = path / "bin" / "python" if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"there is no Python at {environment}; make the environment: {library.install}")
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library.imports!r}) is None)"
    try:
        found = subprocess.run([str(path), "-c", probe], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        found = False
    if not found:
        raise InputError(f"{path} has no {library.imports}; make the environment: {library.install}")
    return path


def _run(command: list[str], method: str, where: Path) -> None:
    log = where / "log.txt"
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, cwd=where)
    if done.returncode:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise InputError(f"{method} failed in its own environment: {why[:300]}; the model is as it was")


def _take_over(model: nn.Module, weights: dict[str, torch.Tensor], method: str) -> None:
    own = dict(model.named_parameters())
    odd = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
    if odd:
        raise CheckpointError(
            f"{method} gave back {odd[0]}, which this model does not have in that shape; nothing was changed"
        )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
