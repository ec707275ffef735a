"""Every number that bounds the pipeline, with its unit and its reason."""

from __future__ import annotations

KB, MB, GB = 1000, 1000**2, 1000**3
KIB, MIB, GIB = 1024, 1024**2, 1024**3

# ------------------------------------------------------------------------------------------------------- headers
HEADER_READ = 256 * KIB  # bytes; one read of this size holds the whole header of nearly every real file
HEADER_MAX = 100 * MB  # bytes; the format's own cap, so that a lying length allocates nothing
INDEX_MAX = 100 * MB  # bytes; a 671B model's index is 9 MB
CONFIG_MAX = 10 * MB  # bytes; of a config.json that is handed to the reload
HEADER_READERS = 8  # threads; headers are small, so latency and not bandwidth is what they wait for

# --------------------------------------------------------------------------------------------------------- shards
DEFAULT_SIZE = 5 * GB  # bytes; what the Hub's own tools cut at, and what a plain HTTP download still takes
ALIGNMENT = 8  # bytes; the data of a safetensors file starts on such a boundary, as its writers pad
HUB_FILE_MAX = 50 * GB  # bytes; larger files are refused by the Hub over LFS and by plain HTTP downloads
HUB_FOLDER_FILES_MAX = 10_000  # files; the Hub's limit for one folder

# ---------------------------------------------------------------------------------------------------------- copy
WINDOW = 4 * MIB  # bytes; what the copy loop holds of a tensor at once
BATCH_MAX = 2 * GB  # bytes; at most this much copying is lost with a killed worker
GAP_MAX = 1 * MIB  # bytes; a gap up to this size is read through, because a new request costs more
AMPLIFICATION_MAX = 2.0  # bytes read per byte written; beyond it a network source is refused by name
MEMORY_FLOOR = 128 * MB  # bytes; the resident set of a copying process without Xet
MEMORY_FLOOR_XET = 512 * MB  # bytes; Xet's own buffers come on top

# ----------------------------------------------------------------------------------------------------------- http
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 60.0  # seconds without a byte; every socket has one, so that nothing hangs for ever
ATTEMPTS = 6  # tries of one request in a row without progress
BACKOFF_FIRST = 0.5  # seconds; doubles each time, with jitter
BACKOFF_MAX = 30.0  # seconds

# -------------------------------------------------------------------------------------------------------- publish
COMMIT_RACES = 8  # times that a commit is re-parented because others commit beside us
REGULAR_MAX = 10 * MB  # bytes; a carried file above it always goes as an object, never inside the commit
