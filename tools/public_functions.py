#!/usr/bin/env python3
"""public_functions.py [ROOT]: every function that the public headers declare.

Prints NAME, what it returns, `noexcept` or `-`, and `inline` (its body is in the header) or `-`.
"""
import pathlib
import re
import sys
from typing import NamedTuple

TOKEN = re.compile(r"[A-Za-z_]\w*|::|->|[{}()<>;:,=*&\[\]~!]|\S")
KEYWORDS = {"alignas", "decltype", "requires", "sizeof", "static_assert", "if", "operator", "noexcept"}
QUALIFIERS = {"static", "inline", "constexpr", "explicit", "virtual", "nodiscard", "friend", "extern"}


class Function(NamedTuple):
    name: str  # "Class::function"
    returns: str  # "" for a constructor
    noexcept: bool
    inline: bool
    header: str


def tokens(text):
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', '""', text)
    text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    return TOKEN.findall(text)


def closing(words, at, opening, close):
    depth = 0
    for i in range(at, len(words)):
        depth += (words[i] == opening) - (words[i] == close)
        if depth == 0:
            return i
    raise ValueError(f"no {close}")


def without_template(words):
    """The statement behind `template <...>` and `requires(...)`."""
    while words and words[0] == "template":
        depth = 0
        for i, word in enumerate(words):
            depth += (word == "<") - (word == ">")
            if word == ">" and depth == 0:
                words = words[i + 1 :]
                break
        else:
            return words
        if words[:2] == ["requires", "("]:
            words = words[closing(words, 1, "(", ")") + 1 :]
    return words


def functions(header, words, scope="", public=True):
    found, start, i = [], 0, 0
    while i < len(words):
        word = words[i]
        if word in (";", "}"):
            start = i + 1
        elif word == ":" and words[i - 1] in ("public", "private", "protected"):
            public, start = words[i - 1] == "public", i + 1
        elif word == "{":
            statement, end = without_template(words[start:i]), closing(words, i, "{", "}")
            kind = next((w for w in statement if w in ("namespace", "class", "struct", "union", "enum")), "")
            if kind == "namespace" or statement[:1] == ["extern"]:
                found += functions(header, words[i + 1 : end], scope)
            elif kind in ("class", "struct") and "=" not in statement and "(" not in statement:
                names = [w for w in statement if re.match(r"[A-Za-z_]\w*$", w)]
                name = names[names.index(kind) + 1 :]
                name = [n for n in name if n not in ("nodiscard", "final")]
                if public and name:  # a struct of C's has none
                    inner = f"{scope}{name[0]}::"
                    found += functions(header, words[i + 1 : end], inner, kind == "struct")
            i = end
            if words[i + 1 : i + 2] != [";"]:
                start = i + 1
        elif word == "(" and "=" not in words[start:i]:
            end = closing(words, i, "(", ")")
            name, statement = words[i - 1], without_template(words[start:i])
            a_type = statement.count("<") > statement.count(">")  # std::function<void(int)>
            a_name = re.match(r"[A-Za-z_]\w*$", name) and name not in KEYWORDS
            if a_name and not a_type and "operator" not in statement:
                after = end + 1
                rest = []
                while after < len(words) and words[after] not in (";", "{", "="):
                    rest.append(words[after])
                    if words[after] == ":":  # a constructor's members
                        while words[after] != "{" or words[after - 1] not in (")", "}"):
                            after = closing(words, after, "{", "}") if words[after] == "{" else after + 1
                        break
                    after += 1
                returns = " ".join(w for w in statement[:-1] if w not in QUALIFIERS and w not in "[]~")
                destructor = "~" in statement
                typedef = statement[:1] in (["using"], ["typedef"])
                inline = words[after : after + 1] == ["{"] or words[after : after + 1] == ["="]
                if public and not destructor and not typedef:
                    found.append(
                        Function(scope + name, returns, "noexcept" in rest, inline, header)
                    )
                i = after - 1
                if words[after : after + 1] == ["{"]:
                    i = closing(words, after, "{", "}")
                    start = i + 1
            else:
                i = end
        i += 1
    return found


def public_functions(root):
    found = []
    for header in sorted((root / "include" / "bittern").rglob("*.h")):
        path = header.relative_to(root / "include").as_posix()
        found += functions(path, tokens(header.read_text()))
    return found


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parent.parent
    for f in public_functions(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here):
        words = [f.header, f.name, f.returns or "-", "noexcept" if f.noexcept else "-"]
        print(*words, "inline" if f.inline else "-", sep="\t")
