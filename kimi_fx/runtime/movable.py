"""Triton's cache of kernels, in a folder that may be moved or copied.

A group is a file that lists the files of one kernel, by their absolute paths when it was written. Here they are looked
for beside it instead: else a kernel of a moved folder is compiled anew, and its files, whose checksums the artefact
store has, are written over. Triton takes the class from TRITON_CACHE_MANAGER.
"""

import json
from pathlib import Path

from triton.runtime.cache import FileCacheManager


class Movable(FileCacheManager):
    def get_group(self, filename: str) -> dict[str, str] | None:
        group = self.get_file(f"__grp__{filename}")
        if group is None:
            return None
        names = json.loads(Path(group).read_text()).get("child_paths")
        return names and {name: file for name in names if (file := self.get_file(name))}
