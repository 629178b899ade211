#!/usr/bin/env python3
"""extract_readme.py FILE.md FOLDER: the fenced cpp, c and python blocks of a page as files, so that
tests can compile and run what readers copy. They are numbered per language: FOLDER/cpp_1.cc,
c_1.c, python_1.py ... Prints each path."""
import pathlib
import re
import sys

SUFFIX = {"cpp": "cc", "c": "c", "python": "py"}


def blocks(text):
    """[(language, code)] in the order of the page."""
    fence = re.compile(r"^```(cpp|c|python)\n(.*?)^```$", re.M | re.S)
    return [(match[1], match[2]) for match in fence.finditer(text)]


def main(page, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    count = dict.fromkeys(SUFFIX, 0)
    for language, code in blocks(pathlib.Path(page).read_text()):
        count[language] += 1
        path = folder / f"{language}_{count[language]}.{SUFFIX[language]}"
        path.write_text(code)
        print(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
