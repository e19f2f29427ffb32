"""What `python ARGUMENTS` does, for `run_warm`: program_job.py FOLDER (SCRIPT | -m NAME | -c CODE)

In FOLDER, where each rank finds a file for its error as torchrun gives it one.
"""

import os
import runpy
import sys
from pathlib import Path

folder, *words = sys.argv[1:]
error_file = Path(folder, os.environ["LOCAL_RANK"], "error.json")
error_file.parent.mkdir()
os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
os.chdir(folder)
if words[0] == "-c":
    sys.argv = ["-c", *words[2:]]
    exec(words[1])
elif words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
