"""Which modules a command loads."""

from __future__ import annotations

import subprocess
import sys

from tests.support.stuck import STUCK

# redis looks whether `cryptography` is there, which loads its version alone.
SIGNING = {"cryptography.hazmat", "model_signing", "sigstore", "securesystemslib", "OpenSSL", "cyclonedx"}
HEAVY = {"torch", "transformers", "huggingface_hub.hf_api", "hf_xet", "celery", "numpy"} | SIGNING


def breaks(names: frozenset[str], forbidden: set[str]) -> set[str]:
    return {name for name in names for banned in forbidden if name == banned or name.startswith(f"{banned}.")}


def loaded_by(*arguments: str, ends_with: int = 0) -> set[str]:
    """The modules that are loaded after `reshard` ran with these arguments in a process of its own."""
    script = (
        "import sys\n"
        f"sys.argv = ['reshard', *{arguments!r}]\n"
        "from reshard.cli.start import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "sys.stderr.write(f'ENDED {code}\\n' + '\\n'.join(name for name, module in sys.modules.items() if module))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=STUCK, check=True)
    code, *modules = done.stderr.rpartition("ENDED ")[2].splitlines()
    assert code == str(ends_with), done.stderr
    return set(modules)
