"""Makes the table of families that capture knows, in docs/capture.md."""

from generated import ROOT, Part, main, table

from thalweg.capture import families


def parts() -> list[Part]:
    """Everything that this script makes."""
    rows = [[f"`{entry.name}`", entry.summary, f"`{entry.source}`"] for entry in families.entries()]
    return [(ROOT / "docs" / "capture.md", "families", table(["`model_type`", "what it is", "tested on"], rows))]


if __name__ == "__main__":
    main(parts())
