#!/usr/bin/env python3
"""check_format.py [--fix]: clang-format over all C++, at the one version whose output we keep; ASCII
only. --fix rewrites the files instead of naming them."""
import pathlib
import shutil
import subprocess
import sys

VERSION = "19.1.7"  # from PyPI: releases differ in what they print
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh"}


def main(fix):
    root = pathlib.Path(__file__).resolve().parent.parent
    tool = shutil.which("clang-format")
    text = tool and subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    if not text or VERSION not in text:
        return f"check_format: clang-format {VERSION} is not on PATH; pip install clang-format=={VERSION}"
    files = [file for folder in ["include", "src", "python", "examples", "tests", "fuzz", "bench"]
             for file in sorted((root / folder).rglob("*")) if file.suffix in SUFFIXES]
    status = 0
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line.isascii():
                print(f"{file.relative_to(root)}:{number}: not ASCII")
                status = 1
    mode = ["-i"] if fix else ["--dry-run", "-Werror", "--ferror-limit=1"]
    return subprocess.run([tool, *mode, *files]).returncode or status


sys.exit(main("--fix" in sys.argv[1:]))
