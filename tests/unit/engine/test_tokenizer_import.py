"""The tokenizer library is imported by one thread at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tokenizer_factory import save_byte_level

PROGRAM = """
import sys, threading
from pathlib import Path
from loramux.engine.tokenizer import Tokenizer, import_library

ahead = threading.Thread(target=import_library)
ahead.start()
while "transformers" not in sys.modules:
    pass
# The import is under way, and the package not complete.
Tokenizer(Path(sys.argv[1]))
ahead.join()
"""


def test_a_tokenizer_is_loaded_while_the_library_is_imported_ahead(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
