"""How batch normalisation distorts a comparison of batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

TINY_BATCH = 16
"""Below this many samples batch normalisation's statistics are poor (Wu & He 2018, arXiv 1803.08494, figure 1)."""

REMEDY = "GroupNorm, or a fixed training.ghost_batch_size, compares batch sizes fairly"


def batch_norm_caveats(
    layers: int, micro_batch_size: int, *, accumulates: bool, ghost_batch_size: int | None
) -> Iterator[tuple[str, str]]:
    """Yield how batch normalisation distorts a comparison at a micro-batch size, as (code, sentence).

    With ghost batches the statistics are over ``ghost_batch_size`` samples, or over the micro-batch where that is
    smaller.
    """
    if not layers:
        return
    samples = micro_batch_size if ghost_batch_size is None else min(micro_batch_size, ghost_batch_size)
    if samples < TINY_BATCH:
        yield (
            "batch_norm_small_batch",
            f"the model has {layers} batch normalisation layers, whose statistics are poor over {samples} samples: "
            + REMEDY,
        )
    if ghost_batch_size is None and accumulates:
        yield (
            "batch_norm_accumulation",
            "batch normalisation sees micro-batches, not batches: accumulated batch sizes train another model; "
            + REMEDY,
        )
    if ghost_batch_size is not None and micro_batch_size < ghost_batch_size:
        yield (
            "ghost_batch_not_filled",
            f"a micro-batch of {micro_batch_size} does not fill a ghost batch of {ghost_batch_size}: its statistics "
            "are over fewer samples than at larger batch sizes",
        )
