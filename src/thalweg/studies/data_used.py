"""Which data the runs of a study were trained on: their name stands in the plan, their content in the records alone."""

from collections.abc import Mapping

from thalweg.studies.judging import few
from thalweg.studies.store import RunRecord

# Of a configuration: what decides the fingerprint, beside the content of files.
ASKED = ("data", "tokenizer", "vocab_size", "objective")


def changed_data(runs: Mapping[str, RunRecord]) -> list[str]:
    """Why runs cannot be compared: one line for each data whose content differs between records that name them alike.

    runs: name -> record. A record without a fingerprint of its data says nothing.
    """
    found: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for name, record in runs.items():
        data = record.result.get("data")
        content = data.get("fingerprint") if isinstance(data, Mapping) else None
        if content is not None:
            asked = tuple(record.config.get(key) for key in ASKED)
            found.setdefault(asked, {}).setdefault(str(content), []).append(name)
    return [
        f"the data {asked[0]} changed between runs: "
        + ", ".join(f"{content[:12]} in {few(names)}" for content, names in contents.items())
        + "; remove the records of all but one content and run those anew"
        for asked, contents in found.items()
        if len(contents) > 1
    ]
