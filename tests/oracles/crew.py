"""A process with a crew whose jobs would take ten minutes, each with a compiler of its own; says when they run."""

import os
import subprocess
import sys
import time
from concurrent.futures import as_completed
from pathlib import Path

from kimi_fx.runtime.crew import crew, submit


def job(file: Path) -> None:
    """Notes the processes that must end."""
    compiler = subprocess.Popen(["sleep", "600"])
    part = file.with_suffix(".part")
    part.write_text(f"{os.getpid()} {compiler.pid}")
    part.rename(file)
    time.sleep(600)


def main(folder: Path) -> int:
    try:
        with crew(2) as pool:
            jobs = [submit(pool, job, folder / name) for name in ("a", "b")]
            print("started", flush=True)
            for done in as_completed(jobs):
                done.result()
    except (KeyboardInterrupt, RuntimeError) as error:
        print(type(error).__name__, error)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
