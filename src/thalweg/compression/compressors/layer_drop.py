"""Layer drop: whole layers go."""

from dataclasses import dataclass

from thalweg.capture.layers import chosen_layers
from thalweg.compression.compressors import register
from thalweg.compression.compressors.base import Compressor, CompressorFacts, CompressorOptions, check_whole
from thalweg.errors import InputError


@dataclass(frozen=True)
class LayerDropOptions(CompressorOptions):
    """drop: the layers that go, as text (``5,7`` or ``20:24``) or a list. count: how many go, those that turn the stream least on the text."""

    drop: str | int | tuple[int, ...] | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.drop is None) == (self.count is None):
            raise InputError("layer_drop needs one of drop (which layers: 5,7) and count (how many, chosen on a text)")
        if self.count is not None:
            check_whole("count", self.count, 1)


@register(
    "layer_drop",
    summary="takes whole layers out: those named, or those that turn the stream least on a text",
    source="Men et al. 2024 (ShortGPT), arXiv 2403.03853, Eq. 1",
    aliases=("shortgpt",),
)
class LayerDrop(Compressor):
    """The model without some of its layers; the others keep their order."""

    Options = LayerDropOptions
    options: LayerDropOptions
    structural = True
    facts = CompressorFacts(
        source="Men et al. 2024 (ShortGPT), arXiv 2403.03853, Eq. 1 (block influence)",
        equation="BI_l = 1 - mean over tokens of cos(h_l, h_(l+1));  the `count` layers of lowest BI go",
        words="A layer that leaves the direction of the stream as it was is taken out. What it would have been given, the next one gets. The "
        "record says which layers are left, by their old numbers.",
        calibration="none with drop; with count tokens: the cosine of the stream before and after each layer (measure layer_drop_cosine)",
        bits="16: nothing else is compressed",
        chosen=("cosines are all measured on the whole model, once", "of equal ones the earlier layer goes"),
        verified=("the model with the layers passed by, on two rows, before and after",),
    )

    @property
    def needs_calibration(self):
        return self.options.count is not None

    def remove(self, located, calibration, batch_size):
        """Take layers out of the model, in place; those left, and notes. Raises: InputError."""
        from thalweg.compression.removing import remove_layers

        if self.options.drop is not None:
            given = self.options.drop
            gone = chosen_layers(list(given) if isinstance(given, tuple) else given, located.depth, to="drop")
            return remove_layers(located, gone), ()
        if self.options.count >= located.depth:
            raise InputError(f"count must be below the {located.depth} layers that there are, got {self.options.count}")
        cosines = self.cosines(located, calibration, batch_size)
        gone = sorted(range(located.depth), key=lambda layer: -cosines[layer])[: self.options.count]
        said = ", ".join(f"{layer} ({cosines[layer]:.4f})" for layer in sorted(gone))
        return remove_layers(located, gone), (f"dropped, with the cosine of the stream before and after: {said}",)

    def cosines(self, located, calibration, batch_size):
        """layer_drop_cosine of every layer on the calibration."""
        from thalweg.capture.measure import measure

        samples = [list(row) for row in calibration.samples]
        rows = measure(
            located.model,
            samples,
            length=calibration.longest,
            batch_size=batch_size,
            measures=["layer_drop_cosine"],
            allow_unverified=True,
        )
        return [
            row.value
            for row in sorted((r for r in rows if r.measure == "layer_drop_cosine"), key=lambda r: r.layer or 0)
        ]
