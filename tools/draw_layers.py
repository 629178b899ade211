#!/usr/bin/env python3
"""draw_layers.py [--check]: draws docs/layers.svg from the table in tools/check_includes.py.

Boxes, arrows and the lists in the boxes come from that table. Only the columns and the descriptions
in PLACE are written by hand; a new layer needs an entry there. --check writes nothing, and exits 1 if
the committed file differs."""
import fnmatch
import pathlib
import sys
import textwrap
from xml.sax.saxutils import escape

import check_includes

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP = "command, Python, tests, benchmarks"
# name: first column, last column, description
PLACE = {
    "include/bittern": (0, 6, "the public C++ and C headers: plain C++20, standard library only"),
    "core": (0, 5, "status, dtypes, scalar arithmetic, GGUF's blocks"),
    "examples": (6, 6, "programs that use the library"),
    "plan": (0, 4, "select, check and run a kernel; all ops behind one interface"),
    "codec": (4, 4, "KV codec, KV cache"),
    "formats": (5, 5, "model files, read and written"),
    "c": (0, 0, "the C interface"),
    "cpu": (2, 3, "SIMD dispatch, threads"),
    "cuda": (1, 1, "plug-in and its loader"),
    "convert": (5, 5, "one model file to another"),
    "text": (5, 6, "tokenisers, chat templates"),
    "model": (3, 5, "decoders that run, and their sessions"),
    "eval": (3, 5, "perplexity, KL from a teacher"),
    "distill": (3, 5, "quantisation by what the layers see"),
    "report": (6, 6, "HTML pages with plots"),
    "ops": (1, 2, "the ops by family: reference, CPU and CUDA kernels; only *.cu files include cuda"),
    "oracle": (1, 2, "compares every kernel with the reference"),
    "ops: cases": (1, 2, "what to check and measure for each op"),
    TOP: (0, 6, "src/cli, python, tests, bench, fuzz"),
}
# Rows of the table that share a folder but may include more than the rest of it.
APART = {"src/ops/*_cases.cc": "ops: cases", "src/ops/*_aims.*": "ops: cases"}
LIBRARIES = [("hwy/*", "Highway"), ("*intrin.h", "intrinsics"), ("omp.h", "OpenMP"), ("re2/*", "RE2"), ("pcre2.h", "PCRE2"), ("utf8proc.h", "utf8proc"),
             ("nlohmann/*", "nlohmann-json"), ("CLI/*", "CLI11"), ("fmt/*", "fmt"), ("dlfcn.h", "dlopen"),
             *((pattern, "CUDA") for pattern in check_includes.CUDA), ("cpuid.h", "cpuid"),
             ("pthread.h", "POSIX"), *((pattern, "POSIX") for pattern in check_includes.POSIX)]
COLUMN, GAP, MARGIN = 158, 18, 16
TITLE, SMALL, LINE = 14, 11, 16  # font sizes, and the distance of lines
ARROW = 34  # between two rows
STYLE = """
  text { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 11px; fill: #1f2328; }
  text.title { font-size: 14px; font-weight: bold; }
  text.about { fill: #57606a; }
  .page { fill: #ffffff; }
  .box { fill: #f6f8fa; stroke: #57606a; }
  .arrow { stroke: #0550ae; stroke-width: 1.5; fill: none; }
  .head { fill: #0550ae; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    text.about { fill: #9da7b1; }
    .page { fill: #0d1117; }
    .box { fill: #161b22; stroke: #8b949e; }
    .arrow { stroke: #79c0ff; }
    .head { fill: #79c0ff; }
  }
"""


def name_of(pattern):
    if pattern == "*":
        return TOP
    if pattern == "include/bittern/*":
        return "include/bittern"
    return APART.get(pattern) or pattern.removeprefix("src/").split("/")[0]


def read_table():
    """{layer: (layers it may include whole, headers of layers it may include, libraries)}, in order."""
    layers = {}
    for pattern, headers in check_includes.LAYERS:
        folder = ROOT / pattern.split("*")[0].rpartition("/")[0]
        if "test" in pattern or not folder.is_dir():
            continue
        layers.setdefault(name_of(pattern), []).extend(headers)
    folders = {"bittern": "include/bittern", **{n: n for n in layers if "/" not in n and " " not in n}}
    table = {}
    for layer, headers in layers.items():
        whole, some, libraries = [], [], []
        for header in dict.fromkeys(headers):
            folder = folders.get(header.split("/")[0]) if "/" in header else None
            if header == "*":  # all that is there, but nothing that only programs for users see
                whole += [n for n in layers if n not in {TOP, "examples"}]
            elif folder and header.endswith("/*"):
                whole.append(folder)
            elif folder:
                some.append(header)
            elif "/" not in header or not (ROOT / "src" / header.split("/")[0]).is_dir():
                match = [name for pattern, name in LIBRARIES if fnmatch.fnmatch(header, pattern) or header == pattern]
                libraries += match[:1] or ([] if header.startswith("gtest") or header == "emulation.h" else [header])
        table[layer] = ([n for n in dict.fromkeys(whole) if n != layer],
                        [h for h in some if folders[h.split("/")[0]] not in {layer, *whole}],
                        list(dict.fromkeys(libraries)))
    return table


def arrows(table):
    """{(from, to): whole}. A header of a layer that comes later in the table is told in words alone."""
    order = list(table)
    all_arrows = {}
    for layer, (whole, some, _) in table.items():
        for target in whole:
            all_arrows[layer, target] = True
        for header in some:
            if order.index(header.split("/")[0]) < order.index(layer):
                all_arrows.setdefault((layer, header.split("/")[0]), False)

    def reaches(start, end, seen):
        steps = [b for a, b in all_arrows if a == start and b not in seen]
        return end in steps or any(reaches(b, end, seen | {b}) for b in steps)

    def implied(start, end):
        return any(reaches(b, end, {start, b}) for a, b in all_arrows if a == start and b != end)
    return {pair: whole for pair, whole in all_arrows.items() if not implied(*pair)}


def wrap(words, columns):
    width = columns * COLUMN + (columns - 1) * GAP - 16
    return textwrap.wrap(words, int(width / (0.65 * SMALL)), break_long_words=False,
                         break_on_hyphens=False) if words else []


def draw():
    table = read_table()
    links = arrows(table)
    everywhere = set.intersection(*(set(whole) for layer, (whole, _, _) in table.items() if layer != "include/bittern"))
    level = {}

    def level_of(layer):
        if layer not in level:
            level[layer] = 1 + max((level_of(b) for a, b in links if a == layer), default=-1)
        return level[layer]
    if missing := [layer for layer in table if layer not in PLACE]:
        sys.exit(f"tools/draw_layers.py: PLACE has no entry for {', '.join(missing)}")
    last = max(PLACE[layer][1] for layer in table)
    boxes, rows = {}, {}
    for layer, (whole, some, libraries) in table.items():
        first, end, about = PLACE[layer]
        span = end - first + 1
        seen = "everything below" if layer == TOP else ", ".join([n for n in whole if n not in everywhere] + some)
        lines = [("about", line) for line in wrap(about, span)]
        lines += [("", line) for line in wrap(f"includes {seen}" if seen else "", span)]
        lines += [("", line) for line in wrap(f"libraries: {', '.join(libraries)}" if libraries else "", span)]
        boxes[layer] = [first, end, lines]
        rows.setdefault(level_of(layer), []).append(layer)
    top = MARGIN + 3 * LINE
    corners = {}
    for row in sorted(rows, reverse=True):
        height = max(28 + LINE * len(boxes[layer][2]) for layer in rows[row])
        for layer in rows[row]:
            first, end, _ = boxes[layer]
            corners[layer] = (MARGIN + first * (COLUMN + GAP), top,
                              MARGIN + end * (COLUMN + GAP) + COLUMN, top + height)
        top += height + ARROW
    width, height = 2 * MARGIN + (last + 1) * COLUMN + last * GAP, top - ARROW + MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
           "<title>Which layer may include which</title>", f"<style>{STYLE}</style>",
           f'<rect class="page" width="{width}" height="{height}"/>']
    notes = ["An arrow goes from a layer to one that it may include; dashed: only the headers named in the box. An arrow that follows",
             f"from others is left out. Every layer may include {' and '.join(sorted(everywhere))}. Tests may include more.",
             "Drawn by tools/draw_layers.py from tools/check_includes.py."]
    out += [f'<text class="about" x="{MARGIN}" y="{MARGIN + 8 + LINE * i}">{escape(n)}</text>' for i, n in enumerate(notes)]
    for layer, (x0, y0, x1, y1) in corners.items():
        out.append(f'<rect class="box" x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}" rx="5"/>')
        out.append(f'<text class="title" x="{x0 + 8}" y="{y0 + 19}">{escape(layer)}</text>')
        assert len(layer) * 0.65 * TITLE <= x1 - x0 - 16, f"{layer}: the name is wider than its box"
        for i, (kind, line) in enumerate(boxes[layer][2]):
            assert len(line) * 0.65 * SMALL <= x1 - x0 - 16, f"{layer}: {line}: wider than its box"
            style = f' class="{kind}"' if kind else ""
            out.append(f'<text{style} x="{x0 + 8}" y="{y0 + 19 + LINE * (i + 1)}">{escape(line)}</text>')
    used = set()
    for (start, end), whole in links.items():
        low, high = (max(corners[start][0], corners[end][0]), min(corners[start][2], corners[end][2]))
        assert low < high, f"{start} -> {end}: give them a column in common in PLACE"
        x, y0, y1 = (low + high) // 2, corners[start][3], corners[end][1]
        for other, (a, b, c, d) in corners.items():
            assert not (a <= x <= c and y0 < b and d < y1), f"{start} -> {end}: the arrow runs into {other}"
        while (x, y1) in used:
            x += GAP
        used.add((x, y1))
        dash = "" if whole else ' stroke-dasharray="4 3"'
        out.append(f'<path class="arrow" d="M{x} {y0} V{y1 - 8}"{dash}/>')
        out.append(f'<path class="head" d="M{x} {y1 - 1} l-5 -9 h10 z"/>')
    return "\n".join([*out, "</svg>", ""])


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    path = ROOT / "docs/layers.svg"
    if not arguments:
        path.write_text(draw())
    elif path.read_text() != draw():
        sys.exit("docs/layers.svg: differs from the table in tools/check_includes.py; run tools/draw_layers.py")


if __name__ == "__main__":
    main(sys.argv[1:])
