"""Every number that bounds the pipeline, with its unit and its reason."""

from __future__ import annotations

KB, MB, GB = 1000, 1000**2, 1000**3
KIB, MIB, GIB = 1024, 1024**2, 1024**3

# ------------------------------------------------------------------------------------------------------- headers
HEADER_READ = 256 * KIB  # bytes; one read of this size holds the whole header of nearly every real file
HEADER_MAX = 100 * MB  # bytes; the format's own cap, so that a lying length allocates nothing
DIMENSIONS_MAX = 1000  # of a tensor; real ones have fewer than 10, and the shapes of many are kept in caches
OPENED_FREE = 1000  # arrays and objects of a header that is not as writers make it ...
OPENED_OF_TENSOR = 16  # ... and so many more for each tensor, which needs three
INDEX_MAX = 100 * MB  # bytes; a 671B model's index is 9 MB
LATEST_MAX = 4 * KIB  # bytes; of DeepSpeed's `latest`, which holds the name of a folder
MANIFEST_MAX = 100 * MB  # bytes; a 671B model's manifest is 9 MB
EVIDENCE_MAX = 8 * MB  # bytes; of a signed statement, which names each file and holds those of its sources
CONFIG_MAX = 10 * MB  # bytes; of a config.json that is handed to the reload
GGUF_HEADER_MAX = 64 * MIB  # bytes; a vocabulary of 260,000 tokens with its merges takes about 15 MB
GGUF_READ = 4 * MIB  # bytes; the longest next read of a header that goes on: what is read and no header, is held too
GGUF_ENTRIES_MAX = 65_536  # keys or tensors of one file; the largest known models have 100 and 3,000
GGUF_NAME_MAX = 65_535  # bytes of a key or of a tensor's name; the specification's bound of keys
GGUF_RENAME_MAX = 63  # bytes of a tensor's new name: llama.cpp refuses more, and stable-diffusion.cpp more than 127
GGUF_DIMENSIONS_MAX = 8  # of a tensor; llama.cpp knows 4, and video models have 5
GGUF_ALIGNMENT_MAX = MIB  # bytes; every file has 32, and the padding of headers is held in memory
HEADER_READERS = 8  # threads; headers are small, so latency and not bandwidth is what they wait for

LAYERS_MAX = 999_999  # of a model by its config; names of tensors count as far, and the largest known model has 126

# ------------------------------------------------------------------------------------------------------- requests
REQUEST_MAX = 64 * KIB  # bytes of a request as a job keeps it; one that uses every option has some 2 kB
CATALOG_MAX = 16 * MB  # bytes of a catalog's file; 100,000 entries that each say where they go have 8 MB
CATALOG_REQUESTS_MAX = 256 * MB  # bytes of the requests of one catalog, which the broker holds in memory
REPO_MAX = 193  # characters of user/repo; the Hub allows 96 on either side
REVISION_MAX = 250  # characters; git keeps a branch in a file of its name, and file systems take 255
URL_MAX = 1000  # characters of a Hub's address or of a folder of an object store
PATH_MAX = 4096  # characters of a folder; PATH_MAX of Linux
GLOBS_MAX, GLOB_MAX = 100, 500  # patterns of one option, and characters of each
SEARCH_MAX = 250  # characters of what a catalog searches for
ASKED_BY_MAX = 350  # characters of who submitted; a name of a user or a token, and of a host

# --------------------------------------------------------------------------------------------------------- shards
BARE_SIZE_MIN = 1 * MB  # bytes; of a size typed without a unit: a smaller number lacks its unit rather than means bytes
DEFAULT_SIZE = 5 * GB  # bytes; what the Hub's own tools cut at, and what a plain HTTP download still takes
OUTLINE_FILES = 200  # files of a job that are listed once its plan is gone: a queue keeps 100,000 jobs that ended
OUTLINE_PATHS = 20_000  # characters of their paths; 200 of `model-00001-of-00200.safetensors` have 6,400
METADATA_COPIES_MAX = 64 * MB  # bytes of `__metadata__` in all shards of a model, which a plan holds; most have some kB
ALIGNMENT = 8  # bytes; the data of a safetensors file starts on such a boundary, as its writers pad

# -------------------------------------------------------------------------------------------------------- renames
RENAME_RULES_MAX = 100  # rules of one request; those between two namings of a family are fewer than 20
RENAME_NODES_MAX = 30_000  # values of their YAML with what its aliases repeat; the most rules have 301
RENAME_TEXT_MAX = 500  # characters of either side of a rule
RENAME_NAME_MAX = 1000  # characters of a name, also between two rules; the longest known have 150
RENAME_PROGRAM_MAX = 1000  # instructions of a compiled expression: what a step through a name may cost
RENAME_MEMORY = 512 * KIB  # bytes of a compiled expression with what it learns of its input
RENAME_CPU = 120.0  # seconds of processor time; a rule takes 4 us a name, so 20 for 90,000 names 7 s

# ------------------------------------------------------------------------------------- the Hub's documented limits
HUB_FILE_MAX = 200 * GB  # bytes; of one file: hub-docs#2037, #2169 "Storage limits", huggingface_hub#3696
HUB_HTTP_MAX = 50 * GB  # bytes; huggingface_hub.file_download refuses more without hf_xet (MAX_HTTP_DOWNLOAD_SIZE)
HUB_FOLDER_FILES_MAX = 10_000  # files in one folder: hub-docs, "Storage limits"
HUB_CALLS_MAX, HUB_RESOLVES_MAX = 1000, 5000  # calls of the API and of the resolver, for an account without a plan ...
HUB_WINDOW = 300.0  # ... in this many seconds: hub-docs, "Rate limits"
TREE_PAGE = 1000  # entries of one page of a listing: huggingface_hub, HfApi.list_repo_tree
PREUPLOAD_BATCH = 256  # files in one preupload call: huggingface_hub, _commit_api.py
DUPLICATE_BATCH = 500  # files in one server-side copy: as above
LFS_BATCH = 100  # objects in one LFS batch call: git-lfs, docs/api/batch.md
PAGES_MAX = 10_000  # pages of one listing; of TREE_PAGE entries each, a Hub has none that long

# ---------------------------------------------------------------------------------------------------------- copy
BATCH_MAX = 2 * GB  # bytes; at most this much copying is lost with a killed worker over Xet ...
SETTLE = 256 * MB  # ... and about this much, or a shard, elsewhere; each time costs a sync or a call
GAP_MAX = 1 * MIB  # bytes; a gap up to this size is read through, because a new request costs more
MEMORY_FLOOR = 128 * MB  # bytes; the resident set of a copying process without Xet
MEMORY_FLOOR_XET = 512 * MB  # bytes; Xet's own buffers come on top
MEMORY_MORE = 64 * MB  # bytes; of each source file that is copied beside the first: its lanes, and a window of a gather
COPY_CORES = 2  # cores that one source file keeps busy from and to memory: a second on them gained nothing
JOBS_MAX = 16  # source files copied side by side; a process runs the Python between two chunks of one at a time

# --------------------------------------------------------------------------------------------------------- doctor
SMALL_FILE = 50 * MB  # bytes; a file below it takes longer to ask for than to send
PROBE_TIMEOUT = 10.0  # seconds; a Hub that takes longer to say who we are is as good as away
AUDIT_JOBS = 4  # models examined side by side; each reads its headers on HEADER_READERS threads of its own
AUDIT_HEADERS = 64 * MIB  # bytes of the headers and indexes of one model that are kept while it is examined
AUDIT_SOURCES = 64  # opened sources that are kept for other models made from them
CLOCK_SKEW_MAX = 60.0  # seconds; signed URLs live for minutes, and their signers allow about one

# ----------------------------------------------------------------------------------------------------------- http
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 60.0  # seconds without a byte; every socket has one, so that nothing hangs for ever
ATTEMPTS = 6  # tries of one request in a row without progress
FIRST_ATTEMPTS = 3  # of an object store that nobody answers for: within 2 s, a misspelled endpoint stays away
BACKOFF_FIRST = 0.5  # seconds; doubles each time, with jitter
RENEWALS = 3  # signed URLs in a row that may be stale before their first byte, as on a slow line
BACKOFF_MAX = 30.0  # seconds

# -------------------------------------------------------------------------------------------------------- publish
COPIES = 3  # times that a group is copied whose bytes arrive damaged, or committed what turns out to be lost
COMMIT_RACES = 8  # times that a commit is re-parented because others commit beside us
COMPONENT_MAX = 255  # bytes; of one component of a path: NAME_MAX of Linux's file systems
REGULAR_MAX = 10 * MB  # bytes; a carried file above it always goes as an object, never inside the commit
INLINE_MAX = 64 * MB  # bytes; of carried files inside one commit: all are held in memory until it is made

# -------------------------------------------------------------------------------------- pickles and torch archives
PICKLE_MAX = 128 * MIB  # bytes; a 91,985-tensor state dict is 15 MB, a DCP metadata of 350,000 chunks 70 MB
PICKLE_MEMORY_BASE = 32 * MIB  # bytes; what a pickle's values may take whatever its own length ...
PICKLE_MEMORY_FACTOR = 40  # ... plus this many bytes for each of its own; measured: 18 state dict, 33 DCP metadata
PICKLE_MEMORY_MAX = 1 * GIB  # bytes; and never more than this
PICKLE_IDLE_FREE = 1_000_000  # steps that end or begin a group and make nothing; a DCP metadata may have more ...
PICKLE_IDLE_BYTES = 4  # ... and then at least so many bytes for each: the shortest group that Python writes has six
NESTING_MAX = 8  # dictionaries inside dictionaries that are searched for tensors; wrappers nest two or three deep
SETTINGS_MAX = 65_536  # values, and characters of texts and keys, of the settings of a torch file; real ones have 100s
ATTRIBUTES_MAX = 64  # of an object of torch's, or of a tensor's metadata; those known have fewer than 10
VALUES_MAX = 10_000_000  # values of a pickle that are looked at while it is searched for tensors
ZIP_DIRECTORY_MAX = 64 * MIB  # bytes; 500,000 records
TAIL_READ = 64 * KIB  # bytes; holds the whole directory of a zip of about 700 records
SPAN_GAP = 128 * KIB  # bytes; small reads this close share a request, which takes longer than reading the gap
SPAN_READ = 4 * MIB  # bytes; the longest request that small reads share
TILING_CELLS_MAX = 4_000_000  # cells, a byte each; a regular grid has one per chunk
BLOB_EDGE = 2 * KIB  # bytes; both ends of a DCP chunk, where its pickle and its directory are
CHUNKS_HELD = 4096  # chunks of a file whose ends are held at once, 5 kB each
EXPANSION_FREE = 16 * MIB  # bytes; a view that repeats its storage may always grow to this ...
EXPANSION_MAX = 64  # ... and otherwise to this many times the bytes that it is made of
LEFT_OUT_MAX = 20  # values without tensors that are named one by one; the rest is counted

# ---------------------------------------------------------------------------------------------------------- gather
GATHER_READ = 8 * MIB  # bytes; what one step of a gather holds of the source
GATHER_HOLE = 4 * KIB  # bytes between elements that are read through: a page, which a disk reads whole in any case
# A transposed 1 GiB takes 7 s in windows of 32 MiB and 41 s in 4 MiB ones. Python 3.14 is 6 MB larger than 3.11: there
# 28 MiB once went over the 128 MB of a copy, under load.
GATHER_WINDOW = 24 * MIB  # bytes
CAST_BLOCK = 64 * KIB  # elements; what a cast holds of them in between, 4 bytes each, fits a core's cache
LOOKUP_BLOCK = 256 * KIB  # elements, of 16 bits, each of which a lookup holds in 8 bytes: below LARGE_BLOCK
DEQUANTIZE_BLOCK = 256 * KIB  # elements of a quantised weight that are made plain at once, 4 bytes each and more
SCALED_WINDOW = 16 * MIB  # bytes; of a weight that is put in order to be made plain, which takes memory beside it
SCALES_HELD = 2 * MIB  # scales of one matrix, 4 bytes each; where there are more, each block reads those that it needs

# --------------------------------------------------------------------------------------------------------- stores
LANE_BYTES = 4 * MIB  # bytes under way between two threads of a copy: a few chunks hide how unevenly each works
LANE_STEPS = 1024  # and of these as many, however few bytes they have: of a view of one byte Python holds some 300
DISK_WRITES = 2  # blocks that a disk has to write at once: it answers two sooner than one after the other
DISK_BLOCK = 2 * MIB  # bytes written at once: past the cache each write waits for the disk
CHUNK = 1 * MIB  # bytes; what a store reads or sends at once: large enough that Python's share per chunk is small
RECEIVE = 256 * KIB  # bytes; what one call takes from a socket at most: httpcore's own 64 KiB double Python's share
STALL_WINDOW = 60.0  # seconds; a connection that brings less than STALL_BYTES in it is given up and resumed
STALL_BYTES = 64 * KIB  # bytes; below this a trickle would keep a socket's own timeout from ever striking
ANSWER_MAX = 32 * MIB  # bytes that are held of an answer; a page of 1,000 files has 1 MB, our record in a store 10
POOL = HEADER_READERS + 2 * JOBS_MAX  # connections per endpoint: a copy needs one for each direction
WAIT_MAX = 600.0  # seconds; the Hub's rate windows are 300 s, so a longer wait is a mistake of the server's
SAMPLE = 512  # bytes of a file that a preupload call shows
ABORT_WAIT = 3.0  # seconds that an abort waits for an upload in progress; a cancelled copy ends within 5
LISTED_MAX = 1_000_000  # objects of one folder of an object store; its owner may have millions in the one above
FOLDER_DEPTH_MAX = 200  # folders in folders; real models have five, and who writes them needs a call for each
STAGED_SHARDS_MAX = 2  # shards on disk per copy over LFS: one is sent while the next is read
LOCK_AGE = 120.0  # seconds; the lock of a target without commits is broken then: its holder has missed five renewals
JSON_PARTS_MAX = 2_000_000  # lists and objects of a text that is parsed here; each takes some 60 bytes of memory
LOCK_RENEW = 20.0  # seconds between them
LOCK_SURE = 60.0  # seconds; its holder places nothing once it could not renew it for so long
LOCK_MAX = 1024  # bytes read of one that is found in a source; ours has 70
WRITE_TIMEOUT = 600.0  # seconds; of an answer of an object store, which copies 5 GB before it gives one
PART_MIN = 8 * MIB  # bytes of a part of an upload to an object store; S3 takes no smaller ones than 5 MiB ...
PARTS_MAX = 10_000  # ... and no more of them: Amazon S3 User Guide, "Amazon S3 multipart upload limits"
STORE_COPY_MAX = 5 * 1000**3  # bytes; CopyObject takes at most 5 GB (Amazon S3 API Reference)
STORE_COPIES = 8  # copies that a store makes at a time: while they last, its folder is neither the old nor the new one
BUCKET_BATCH = 1000  # operations of one call on a bucket; what huggingface_hub sends at once
STAGING_AGE = 7 * 24 * 3600.0  # seconds; what a folder target staged for a job that nobody went on with is removed then
MARK_KEY = 32  # bytes; of the key by which a machine knows its own records in folders, as long as a sha256
RECORD_MAX = 100 * MB  # bytes; of the record of our publications: a thousand, of 1,000 shards and 100 texts, have 10 MB
KEPT_MAX = 64 * KIB  # bytes; of a published text that a folder target remembers, to tell an edit by its owner later

# --------------------------------------------------------------------------------------------------------- reload
RELOAD_START = 120.0  # seconds; torch and transformers import in 2.5 s, from a cold disk in a minute
RELOAD_TIME = 180.0  # seconds of one request, three times its processor time for a machine that copies too
RELOAD_CPU = 60  # seconds of processor time of one request; the slowest honest layout (671B, fp8) takes 10
RELOAD_MEMORY = 1 * GIB  # bytes of address space beyond what the imports take; the 671B layout needs 0.4 GB
RELOAD_GRACE = 5.0  # seconds; a child that ends its fork at the limit says so within one
RELOAD_FILE = 16 * MIB  # bytes; the longest file that a check may write: its log, its config
RELOAD_ANSWER = 64 * MIB  # bytes; the longest answer that is read from the child
RELOAD_CACHE = 64  # verdicts kept, in memory and on disk; one is a few kB
REPORT_NAMES_MAX = 200  # names per list of a report; the rest is counted
EXCHANGED_SHOWN = 10  # names that hold another tensor of the source, which a check shows; the rest is counted
OCCUPIED_SHOWN = 5  # files of others that an error names; a plan lists all
TOKENIZER_MAX = 256 * MIB  # bytes; of one file of a tokenizer that is fetched to be loaded; the largest known has 34 MB
READ_AGAIN_MAX = 20  # tensors that differ and are read again to say where; of another model a few say enough
SHARED_MAX = 100  # commits of main among which a branch of ours may have begun
MESSAGES_MAX = ANSWER_MAX // 4  # bytes; of all publications in a record, which has the last one's files as well
HISTORY_MAX = 1000  # commits; how far back we look for our own last publication

# ------------------------------------------------------------------------------------------------------------ xet
PRIME = 256 * KIB  # bytes of each source file's head that are sent again, so that the store tells what it has of it
PULSE = 1.0  # seconds between two looks at what hf_xet has sent; a lease is lost after a hundred without any
PRIME_MIN = 1 * MIB  # bytes of a source file; of a smaller one there is less to save than asking costs
XET_READ_MIN = 1 * MIB  # bytes; below this a range costs less over HTTP than a reconstruction and its own requests
XET_ATTEMPTS = 3  # of a stream without progress; hf_xet has repeated each request by itself before
XET_TOKEN_KEPT = 60.0  # seconds that one serves the steps of a job, and that it has to be good for after them
XORB_MAX = 64 * MIB  # bytes; what the content store moves as one object, and hf_xet holds several of in each direction
LARGE_BLOCK = 4 * MIB  # bytes; blocks of memory from here on go back to the system when freed; of smaller ones ...
HEAP_KEPT = 8 * MIB  # ... so many bytes are kept for reuse: about what the lanes of a copy hold
XET_LARGE_BLOCK = 32 * MIB  # ... over Xet from here on, the most that glibc takes: hf_xet's have up to 16 MiB ...
XET_HEAP_KEPT = 64 * MIB  # ... several at a time: new pages for each took two fifths of a copy's processor time ...
HEAP_TRIMMED = 128 * KIB  # ... and only so many where each of hf_xet's threads may have a heap; glibc's own default
XET_CHECKS = 8  # threads that ask the store whether it still has an object
LOAD_TIME = 7200.0  # seconds of a real load; a 7B model on disk offload reads 14 GB twice
LOAD_CPU = 7200  # seconds of processor time of a real load and its forward pass
LOAD_WATCH = 0.1  # seconds between two looks at a load's memory; it may overshoot by what it allocates in one

# -------------------------------------------------------------------------------------------------------- forecast
SEAM_UPLOAD = 120 * KB  # bytes; a seam cuts a chunk of 64 KiB on average in two new ones, measured with hf_xet 1.8
