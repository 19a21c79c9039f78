"""The lints of C++ find what breaks a limit, and let the good pass."""

import pytest
from cxx import functions, sizes, unguarded

STATEMENTS = "    x = 1;\n" * 60
BITES = [
    ("int x;\n" * 501, "501 lines"),
    ("//" + "-" * 119, "121 characters wide"),
    (f"void f(int x) {{\n{STATEMENTS}}}\n", "a.cpp:1: f has 62 lines"),
    (f"\ntemplate <int R>\nstatic inline void f(const T &x,\n  int y) {{\n{STATEMENTS}}}\n", "a.cpp:2: f has 64 lines"),
    (f"namespace a {{\nstruct B {{\n  int f() const {{\n{STATEMENTS}  }}\n}};\n}}\n", "a.cpp:3: f has 62 lines"),
    (f"struct B {{\n  explicit B(int x) : x(x) {{\n{STATEMENTS}  }}\n}};\n", "a.cpp:2: B has 62 lines"),
    (f"void f() {{\n  char c = '}}';  // }}\n{STATEMENTS}}}\n", "a.cpp:1: f has 63 lines"),
    ("#define M(x) \\\n" + "    x; \\\n" * 60 + "\nint y;\n", "a.cpp:1: M has 62 lines"),
]


@pytest.mark.parametrize(("text", "finding"), BITES, ids=[finding for _, finding in BITES])
def test_the_limit_bites(text: str, finding: str) -> None:
    assert finding in next(sizes("a.cpp", text))


GOOD = f"""// one {{ brace
#define M(x) {{
const char *s = "{{";
struct B {{ int x; }};
static const int table[2] = {{1, 2}};
void f() {{
{STATEMENTS[:-22]}}}
void g() {{ run([&](int x) {{ return x; }}); }}
"""


def test_the_limit_lets_the_good_pass() -> None:
    assert not list(sizes("a.cpp", GOOD))
    assert [name for name, _, _ in functions(GOOD)] == ["f", "g"]


def test_an_unguarded_instruction_is_seen() -> None:
    program = "#ifdef SPARRING_PAIRS\n__m512i a;\n#ifdef SPARRING_AVX512\n__m512i b;\n#else\n__m512i c; // __m512i\n#endif\n#endif"
    assert list(unguarded(program)) == [2, 6]
