#!/usr/bin/env python3
"""check_requirements.py FILE: are the packages a requirements file lists present? Names those not."""
import importlib.metadata
import pathlib
import re
import sys


def names(path):
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            yield from names(path.parent / line[3:].strip())
        elif match := re.match(r"([\w.-]+)(\[cpu\])?", line):
            yield match[1]
            if match[2]:
                yield f"{match[1]}-cpu"


def present(name):
    try:
        importlib.metadata.version(name)
        return True
    except importlib.metadata.PackageNotFoundError:
        return False


if len(sys.argv) != 2:
    sys.exit(__doc__)
missing = [name for name in names(pathlib.Path(sys.argv[1])) if not present(name)]
if missing:
    sys.exit(f"test: missing Python packages: {' '.join(missing)}; leave out --no-install once, and "
             f"./test puts them into .venv, or install {sys.argv[1]} into an active environment")
