"""``python -m reshard.worker.program``: the celery command, for our app alone.

It imports the app before that command does, which puts the current folder first on the path for it: a worker may be
started in a model's folder.
"""

from __future__ import annotations

from celery.__main__ import main

import reshard.worker.app  # noqa: F401 -- see above

if __name__ == "__main__":
    main()
