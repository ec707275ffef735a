"""Sizes by what the files are for: `--for browser` is a `--size` with a reason. Pure data."""

from __future__ import annotations

from reshard.pipeline.limits import GB, GIB, HUB_HTTP_MAX, MB

# The most bytes that a file may have for each use.
PROFILES: dict[str, int] = {
    # One ArrayBuffer holds 2 GB at most, and wllama, which runs models in browsers, advises parts of 512 MB: they come
    # in parallel, and none exhausts the page's memory. https://github.com/ngxson/wllama, "Limitations", "Split model".
    "browser": 512 * MB,
    # FAT32 counts a file's bytes in 32 bits: Microsoft FAT Specification (2004), section 6.2: DIR_FileSize.
    "fat32": 4 * GIB - 1,
    # What transformers 4 cut at (4.57, PreTrainedModel.save_pretrained), so that a model loads on a free Colab machine,
    # which holds one such file in its 12 GB of memory beside the model.
    "colab": 5 * GB,
    # The largest file of the Hub that every client can download, with or without hf_xet, and what transformers 5 cuts
    # at (PreTrainedModel.save_pretrained, `max_shard_size`): the fewest files.
    "hub": HUB_HTTP_MAX,
}
