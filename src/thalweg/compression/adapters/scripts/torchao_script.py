"""Runs in an environment of torchao: ``python torchao_script.py JOB.json``; files as in llmcompressor_script.py."""

import importlib
import json
import sys
from pathlib import Path


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    library = importlib.import_module("torchao")
    safetensors = importlib.import_module("safetensors.torch")
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto").eval()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    chosen = {name: module for name, module in linear.items() if name not in job["ignore"]}
    before = {name: module.weight.detach().clone() for name, module in chosen.items()}
    if job["method"] == "wanda":
        wanda(model, chosen, job)
    else:
        rounded(model, chosen, job)
    after = {name: dense(module.weight) for name, module in model.named_modules() if name in chosen}
    output = Path(job["output"])
    changed = {f"{name}.weight": w.contiguous() for name, w in after.items() if not torch.equal(w, before[name])}
    safetensors.save_file(changed, output / "weights.safetensors")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "torchao": library.__version__}
    (output / "result.json").write_text(json.dumps({"versions": versions, "errors": {}}), encoding="utf-8")


def rounded(model, chosen: dict, job: dict) -> None:
    torch = importlib.import_module("torch")
    q = importlib.import_module("torchao.quantization")
    group = job["options"]["group"]
    granularity = q.PerAxis(0) if group == "row" else q.PerGroup(group)
    kind = torch.int8 if job["method"] == "int8" else torch.int4
    config = q.IntxWeightOnlyConfig(weight_dtype=kind, granularity=granularity)
    q.quantize_(model, config, filter_fn=lambda module, name: name in chosen)


def wanda(model, chosen: dict, job: dict) -> None:
    torch = importlib.import_module("torch")
    sparsity = job["options"]["sparsity"]
    n_m = isinstance(sparsity, str) and ":" in sparsity
    options = (
        {"semi_structured_block_size": int(sparsity.split(":")[1])} if n_m else {"sparsity_level": float(sparsity)}
    )
    sparsifier = importlib.import_module("torchao.sparsity").WandaSparsifier(**options)
    sparsifier.prepare(model, [{"tensor_fqn": f"{name}.weight"} for name in chosen])
    with torch.no_grad():
        for row in json.loads(Path(job["samples"]).read_text(encoding="utf-8")):
            model(input_ids=torch.tensor([row]), use_cache=False)
    sparsifier.step()
    sparsifier.squash_mask()


def dense(weight):
    """The values of a weight that a library packed."""
    data = weight.detach()
    return (
        data.dequantize()
        if hasattr(data, "dequantize") and type(data).__name__ not in ("Tensor", "Parameter")
        else data
    )


if __name__ == "__main__":
    main(sys.argv[1])
