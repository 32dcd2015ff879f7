"""Runs in an environment of llm-compressor: ``python llmcompressor_script.py JOB.json``.

JOB.json: model (folder), output (folder that is there), method (wanda, awq), options, ignore (names of linear maps left alone),
samples (lists of token numbers; a file). Writes output/weights.safetensors (every parameter that changed, dense) and output/result.json.
"""

import importlib
import json
import sys
from pathlib import Path


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    library = importlib.import_module("llmcompressor")
    safetensors = importlib.import_module("safetensors.torch")
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    samples = json.loads(Path(job["samples"]).read_text(encoding="utf-8"))
    rows = [
        {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        for row in samples
    ]
    if (
        not torch.accelerator.is_available()
    ):  # 0.14 pins memory in AWQ's cache, which raises where there is no accelerator
        importlib.import_module("llmcompressor.pipelines.cache").IntermediatesCache.pin_memory = lambda self, index: (
            None
        )
    library.oneshot(
        model=model,
        processor=unused_tokenizer(transformers),
        dataset=torch.utils.data.DataLoader(rows, batch_size=None),
        recipe=recipe(job),
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, samples)),
        shuffle_calibration_samples=False,
        pipeline="sequential",
    )
    errors = dequantised(model)
    changed = {
        name: p.detach().contiguous()
        for name, p in model.named_parameters()
        if name in before and not torch.equal(p, before[name])
    }
    output = Path(job["output"])
    safetensors.save_file(changed, output / "weights.safetensors")
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "transformers", "llmcompressor")}
    (output / "result.json").write_text(json.dumps({"versions": versions, "errors": errors}), encoding="utf-8")


def unused_tokenizer(transformers):
    """The library asks for one wherever it is given data, also where the data are token numbers."""
    tokenizers = importlib.import_module("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="[UNK]")


def recipe(job: dict) -> list:
    options = job["options"]
    if job["method"] == "wanda":
        pruning = importlib.import_module("llmcompressor.modifiers.pruning")
        sparsity = options["sparsity"]
        n_m = isinstance(sparsity, str) and ":" in sparsity
        share = int(sparsity.split(":")[0]) / int(sparsity.split(":")[1]) if n_m else float(sparsity)
        structure = sparsity if n_m else "0:0"
        return [
            pruning.WandaPruningModifier(
                sparsity=share, mask_structure=structure, targets=["Linear"], ignore=job["ignore"]
            )
        ]
    awq = importlib.import_module("llmcompressor.modifiers.transform.awq")
    quantization = importlib.import_module("llmcompressor.modifiers.quantization")
    weights = {
        "num_bits": options["bits"],
        "type": "int",
        "symmetric": options["symmetric"],
        "strategy": "group",
        "group_size": options["group"],
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return [
        awq.AWQModifier(duo_scaling=options["duo"], n_grid=options["grid"]),
        quantization.QuantizationModifier(config_groups=groups, ignore=job["ignore"]),
    ]


def dequantised(model) -> dict:
    """Put the rounded values in place of the weights; the relative error of every map, in the library's own scaling."""
    errors = {}
    torch = importlib.import_module("torch")
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or getattr(scheme, "weights", None) is None:
            continue
        rounding = importlib.import_module("compressed_tensors.quantization").forward_quantize
        with torch.no_grad():
            dense = module.weight.detach().clone()
            rounded = rounding(module, dense, "weight", scheme.weights)
            square, whole = float((rounded - dense).square().sum()), float(dense.square().sum())
            errors[name] = [square / dense.numel(), square / whole if whole else 0.0]
            module.weight.data.copy_(rounded)
    return errors


if __name__ == "__main__":
    main(sys.argv[1])
