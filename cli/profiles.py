"""Sizes by what the files are for: `--for browser` is a `--size` with a reason. Pure data."""

from __future__ import annotations

from typing import Literal, NamedTuple

from reshard.pipeline.limits import GB, GIB, HUB_FILE_MAX, MB

Use = Literal["browser", "fat32", "colab", "hub"]


class Profile(NamedTuple):
    """The most bytes that a file may have for one use, and why."""

    size: int
    reason: str


PROFILES: dict[Use, Profile] = {
    # https://github.com/ngxson/wllama, README: "Limitations" and "Split model".
    "browser": Profile(
        512 * MB,
        "one ArrayBuffer holds 2 GB at most, and wllama, which runs models in browsers, advises parts of 512 MB: they"
        " come in parallel, and none of them exhausts the page's memory",
    ),
    # Microsoft FAT Specification (2004), section 6.2: DIR_FileSize has 32 bits.
    "fat32": Profile(
        4 * GIB - 1, "FAT32, the file system of memory cards and sticks, counts a file's bytes in 32 bits"
    ),
    # transformers 4.57, PreTrainedModel.save_pretrained: the reason that it gives for its default.
    "colab": Profile(
        5 * GB,
        "what transformers 4 cut at, so that a model loads on a free Colab machine, which holds one such file in its"
        " 12 GB of memory beside the model",
    ),
    # transformers 5, PreTrainedModel.save_pretrained: `max_shard_size`; the Hub's limit for a file over LFS and HTTP.
    "hub": Profile(
        HUB_FILE_MAX,
        "the largest file that the Hub takes and serves to every client, and what transformers 5 cuts at: the fewest"
        " files",
    ),
}
