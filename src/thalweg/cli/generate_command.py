"""``thalweg generate``: text from a trained run."""

import math
from pathlib import Path

from thalweg.cli.console import emit
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg generate runs/mgt-d4-s0 --prompt "It is a truth"
  thalweg generate runs/mgt-d4-s0 --prompt "She was" --tokens 60 --temperature 0 --which last"""

GREEDY = 1e-6  # below this temperature the likeliest token is taken: dividing by less would overflow


def configure(parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run of a decoder on text (no folder of a saved model)")
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--tokens", type=int, default=80, help="tokens to add (80)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (0.8)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    parser.add_argument("--which", choices=("best", "last"), default="best", help="checkpoint (best)")


def run(args) -> ExitCode:
    text = generate(args.run, args.prompt, args.tokens, args.temperature, args.seed, args.which)
    emit({"prompt": args.prompt, "text": text}) if args.json else print(args.prompt + text)
    return ExitCode.OK


def generate(run: str | Path, prompt: str, tokens: int, temperature: float, seed: int, which: str) -> str:
    """What the model of ``run`` adds to ``prompt``.

    Raises: InputError for values out of range, a run without text, an empty prompt, or more tokens than the model's length.
    """
    import torch

    from thalweg.capture.limits import check_room
    from thalweg.models import DecoderCache
    from thalweg.records.run import RunFolder
    from thalweg.training import load_decoder
    from thalweg.training.config import from_table
    from thalweg.training.tasks import load_task

    if tokens < 1:
        raise InputError(f"tokens must be at least 1, got {tokens}")
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature must be a finite number of at least 0, got {temperature:g}")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed must lie in 0..2**63-1, got {seed}")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is not UTF-8 text (character {error.start}: {error.reason}); type it in UTF-8"
        ) from None
    refuse_model(Path(run))
    folder = RunFolder.open(run)
    wanted = from_table(folder.config)
    task = load_task(wanted)
    if task.objective != "next_token":
        raise InputError(f"{run} holds an encoder, which predicts no next token; give a run of a decoder")
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is None:
        raise InputError(f"{run} was trained on the task {wanted.data!r}, which has no text")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise InputError("the prompt is empty; give at least one character")
    model, _ = load_decoder(run, which)
    check_room(model, len(ids), tokens)
    generator = torch.Generator().manual_seed(seed)
    cache, given, added = DecoderCache(), torch.tensor([ids]), []
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(given, cache=cache, logits_to_keep=1).logits[0, -1].float()
            if not logits.isfinite().all():
                raise InputError(
                    f"{run}: the logits at token {len(ids) + len(added)} are not numbers; its training diverged, or the weights were damaged"
                )
            choice = (
                logits.argmax()
                if temperature < GREEDY
                else torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
            )
            added.append(int(choice))
            given = choice.reshape(1, 1)
    return tokenizer.decode(added)


def refuse_model(path: Path) -> None:
    """Raises: InputError for the folder of a saved model, which is no run."""
    import json

    from thalweg.models.hf_config import ThalwegEncoderConfig
    from thalweg.records.run import RunFolder

    config = path / "config.json"
    if RunFolder.is_run(path) or not config.is_file():
        return
    try:
        kind = json.loads(config.read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):  # broken or foreign: still no run
        kind = None
    if kind == ThalwegEncoderConfig.model_type:
        raise InputError(
            f"{path} is the folder of a saved encoder, which predicts no next token; give the folder of a run of a decoder"
        )
    raise InputError(
        f"{path} is the folder of a saved model, and generate takes that of a run (with run.json); give the run, or in Python "
        "transformers.AutoModelForCausalLM.from_pretrained, if it is a decoder, and its generate"
    )
