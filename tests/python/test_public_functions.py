"""tests/allocation_test.cc calls every public function, and none of them throws."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from public_functions import functions, public_functions, tokens  # noqa: E402

# Types whose making may need memory.
OWNING = re.compile(r"^(Status|Result\b|std :: (string|vector)\b)(?!_view)")
# What every op has: called for each op of ops.inc.
OF_AN_OP = ("check", "check_contents", "shape_hint")


def called():
    text = (ROOT / "tests" / "allocation_test.cc").read_text()
    return set(re.findall(r'"([A-Za-z_:0-9]+)"', text))


def ops():
    return set(re.findall(r"BITTERN_OP\((\w+)", (ROOT / "src" / "ops" / "ops.inc").read_text()))


def test_the_headers_are_understood():
    header = """
    // a comment(with brackets)
    namespace bittern {
    struct [[nodiscard]] A {
      int member = f(3);
      std::function<Status(int)> called = nullptr;
      static Result<A> make(const B& b = {}, int n = 0) noexcept;
      template <class T>
        requires(sizeof(T) > 1)
      Status take(T t) const {
        return g(t);
      }
      A(int x) : member(x), other{x} {}
     private:
      void hidden();
    };
    enum class E { one, two };
    inline constexpr int kNumber = h(2);
    std::string text(std::function<void(int)> f);
    }
    """
    found = {(f.name, f.returns, f.noexcept, f.inline) for f in functions("x.h", tokens(header))}
    assert found == {
        ("A::make", "Result < A >", True, False),
        ("A::take", "Status", False, True),
        ("A::A", "", False, True),
        ("text", "std :: string", False, False),
    }


def test_every_function_is_called_with_failing_allocations():
    all_ops, names = ops(), called()
    missing = []
    for f in public_functions(ROOT):
        scope, _, name = f.name.rpartition("::")
        if f.header.startswith("bittern/c/"):
            needed = True
        else:
            needed = OWNING.match(f.returns) and not (scope in all_ops and name in OF_AN_OP)
        if needed and f.name not in names:
            missing.append(f"{f.header}: {f.name}")
    assert missing == []
    assert len(all_ops) > 25


def test_functions_of_the_library_are_noexcept():
    """But for C's, which are no C++, and for what is in the headers for all to see."""
    throwing = [
        f"{f.header}: {f.name}"
        for f in public_functions(ROOT)
        if not f.noexcept and not f.inline and not f.header.startswith("bittern/c/")
    ]
    assert throwing == []
