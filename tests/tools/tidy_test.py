"""Plants each kind of violation in a small tree; tools/tidy.py must find it, and nothing else."""
import pathlib
import shutil
import sys
import tempfile
import textwrap
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import cpp_scan  # noqa: E402
import tidy  # noqa: E402

CLEAN = {
    "include/cadre/thing.h": """\
        #pragma once
        #include <cstdint>

        namespace cadre {

        struct Thing {
          static constexpr int kMost = 4;
          int64_t rows = 0;
          bool operator==(const Thing&) const = default;
        };

        int weigh(const Thing&, int a, int b, int c,
                  int d);

        }  // namespace cadre
        """,
    "src/ops/thing.cpp": """\
        #include "cadre/thing.h"

        namespace cadre {
        namespace {

        constexpr int kTable[] = {1, 2, 3};
        const char* const kName = "getenv m_splits printf(";

        }  // namespace

        int weigh(const Thing& thing, int a, int b, int c, int d) {
          static const int kBase = 3;
          return int(thing.rows) + a + b + c + d + kTable[0] + kName[0] + kBase;
        }

        }  // namespace cadre
        """,
    "src/ops/CMakeLists.txt": "target_sources(cadre PRIVATE thing.cpp)\n",
    "src/cpu/CMakeLists.txt": "target_sources(cadre PRIVATE it.cpp)\n",
    "src/cuda/CMakeLists.txt": "target_sources(cadre PRIVATE it.cu)\n",
    "tests/CMakeLists.txt": "cadre_test(it_test)\n",
    "cli/CMakeLists.txt": "add_executable(cadre_cli it.cpp)\n",
}

LONG_BODY = "  int x = 0;\n" * 75
TO_DO = "TO" + "DO"
HOME = "/" + "home/somebody"

# (name, file, content, part of the finding)
PLANTED = [
    ("layer: cpu sees ops", "src/cpu/it.cpp", '#include "ops/inner.h"\n', "src/cpu may not"),
    ("layer: layers see backend", "src/layers/it.h", '#include "backend/entry.h"\n',
     "src/layers may not include src/backend/entry.h"),
    ("layer: public sees src", "include/cadre/it.h", '#include "backend/entry.h"\n',
     "include/cadre may not include"),
    ("layer: cli sees src", "cli/it.cpp", '#include "../src/backend/entry.h"\n',
     "cli may not include"),
    ("layer: cpu sees more of backend than the entry", "src/cpu/it.cpp",
     '#include "backend/walk.h"\n', "src/cpu may not include src/backend/walk.h"),
    ("unknown room", "attic/it.cpp", "int f();\n", "no room"),
    ("unknown room in src", "src/attic/it.h", "int f();\n", "no room"),
    ("cuda header", "src/cpu/it.cpp", "#include <cuda_runtime.h>\n", "not include cuda_runtime"),
    ("nccl header", "src/cuda/it.cu", "#include <nccl.h>\n", "may not include nccl.h"),
    ("torch header", "cli/it.cpp", "#include <torch/all.h>\n", "may not include torch/all.h"),
    ("dnnl header", "cli/it.cpp", "#include <dnnl.hpp>\n", "may not include dnnl.hpp"),
    ("unknown header", "cli/it.cpp", "#include <boost/any.hpp>\n", "unknown header boost/any.hpp"),
    ("long file", "cli/it.h", "int f();\n" * 501, "file has 501 lines"),
    ("long file of the library", "include/cadre/it.h", "int f();\n" * 401, "file has 401 lines"),
    ("long file of the door", "torch/csrc/it.h", "int f();\n" * 401, "file has 401 lines"),
    ("function of 46 lines", "cli/it.cpp", "int f() {\n" + "  int x;\n" * 44 + "}\n",
     "function f has 46 lines; split it, the limit is 45"),
    ("wide line", "include/cadre/it.h", "int " + "f" * 100 + "();\n", "columns"),
    ("long function", "cli/it.cpp", "int f() {\n" + LONG_BODY + "}\n", "function f has 77 lines"),
    ("long function, signature over lines", "cli/it.cpp",
     "template <class T>\nstd::map<int, T> f(int a,\n    int b) noexcept\n{\n" + LONG_BODY + "}\n",
     "function f has"),
    ("long member", "cli/it.cpp",
     "namespace x {\nclass A : B<int> {\n public:\n  A(int a)\n  : a_{a}, b_(1) {\n" + LONG_BODY +
     "  }\n  int a_;\n};\n}\n", "function A has 78 lines"),
    ("long member outside its class", "cli/it.cpp",
     "template <class T>\nbool A<T>::operator()(int a) const {\n" + LONG_BODY + "}\n",
     "operator has"),
    ("long function behind a lambda variable", "cli/it.cpp",
     "constexpr auto kF = [](int a) { return a; };\nint f() {\n" + LONG_BODY + "}\n",
     "function f has"),
    ("long kernel", "src/cuda/it.cu",
     "__global__ void __launch_bounds__(128)\nk(int a) {\n" + "  int x;\n" * 40 + "}\n",
     "kernel body k has 42 lines"),
    ("parameters", "include/cadre/it.h",
     "int f(int a, std::array<int, 2> b, int c = g(1, 2), int d = 0,\n int e = 0,\n int g = 0);\n",
     "f has 6 parameters"),
    ("parameters of a member", "include/cadre/it.h",
     "struct A {\n  template <class T>\n  static T f(T, T, T, T, T, T) { return {}; }\n};\n",
     "f has 6 parameters"),
    ("template parameters", "include/cadre/it.h",
     "template <class A, class B = std::pair<int, int>, int C = 1, bool D = (1 > 0)>\nstruct S;\n",
     "template has 4 parameters"),
    ("environment", "src/cpu/it.cpp", "auto x = [] { return getenv(kName); }();\n", "environment"),
    ("cout", "src/ops/thing.cpp", "void f() { std::cout << 1; }\n", "printing"),
    ("printf", "include/cadre/it.h", "inline void f() { printf(kText); }\n", "printing"),
    ("device memory", "src/cuda/it.cu", "void f() { cudaMallocAsync(&p, 1, s); }\n", "allocation"),
    ("malloc", "src/cpu/it.cpp", "void f() { g(malloc(3)); }\n", "allocation"),
    ("new", "src/cpu/it.cpp", "void f() { g(new int[3]); }\n", "allocation"),
    ("vector", "src/cpu/it.cpp", "void f() {\n  std::vector<int> a;\n}\n", "growth"),
    ("growing", "src/cpu/it.cpp", "void f() { a.push_back(1); }\n", "growth"),
    ("waiting", "src/cuda/it.cu", "void f() { cudaStreamSynchronize(s); }\n", "synchronisation"),
    ("using namespace", "src/cpu/it.cpp", "using namespace std;\n", "namespace"),
    ("include guard", "include/cadre/it.h", "#ifndef CADRE_IT_H\n#endif\n", "pragma once"),
    ("ifdef on a backend", "src/ops/thing.cpp", "#ifdef CADRE_CUDA\n#endif\n", "backend_switch"),
    ("if defined on an architecture", "src/cuda/it.cu", "#if __CUDA_ARCH__ >= 900\n#endif\n",
     "backend_switch"),
    ("word", "include/cadre/it.h", "void f(int m_splits);\n", "says m_splits"),
    ("word within a word", "src/ops/thing.cpp", "int dropRowwiseData();\n", "says rowwise"),
    ("word, scale", "src/cpu/it.cpp", "struct A { float x_scale_inv; };\n", "says scale_inv"),
    ("type that could be anything", "torch/csrc/it.cpp", "struct Given {\n  int a;\n};\n",
     "vague_type"),
    ("phrase in a comment", "src/cuda/it.h", "// Loaded by the Copy Engine.\n",
     "'copy engine' is no word of this project; it says TMA"),
    ("phrase over two lines of a comment", "bench/it.h", "/// the tiles of one second\n/// cache\n",
     "'second cache'"),
    ("phrase on a page", "docs/it.md", "all multiprocessors\n", "it says SMs"),
    ("phrase in Python", "torch/cadre/it.py", "a = 1  # every so manieth\n", "'so manieth'"),
    ("word of the hardware", "src/cuda/it.h", "int copyEngineBytes();\n", "says copy_engine"),
    ("mutable global", "src/cpu/it.cpp", "namespace cadre {\nint count = 0;\n}\n", "mutable g"),
    ("mutable global of a class type", "src/cpu/it.cpp", "std::array<int, 3> table{};\n",
     "table is a mutable global"),
    ("mutable pointer to const", "src/cpu/it.cpp", "const char* last = nullptr;\n", "last is a"),
    ("mutable local static", "src/cpu/it.cpp", "int f() {\n  static int calls;\n  return 1;\n}\n",
     "calls is a mutable global"),
    ("thread local", "src/cpu/it.cpp", "thread_local int depth = 0;\n", "depth is a"),
    ("mutable static member", "include/cadre/it.h", "struct A {\n  inline static int all;\n};\n",
     "all is a mutable global"),
    ("mutable variable of an unnamed type", "src/cpu/it.cpp", "struct { int a; } state;\n",
     "state is a mutable global"),
    ("to-do", "docs/it.md", f"a\n{TO_DO}: later\n", "to-do"),
    ("to-do in code", "cli/it.cpp", f"int f();  // {TO_DO} later\n", "to-do"),
    ("room called util", "src/cpu/util/it.h", "int f();\n", "says nothing"),
    ("file called helpers", "tests/helpers.h", "int f();\n", "says nothing"),
    ("path of a machine", "docs/it.md", f"see {HOME}/x\n", "absolute path"),
    ("path of a machine in a build file", "src/cpu/CMakeLists.txt", f"# it {HOME}/x\n",
     "absolute path"),
    ("forgotten source", "src/cpu/other.cpp", "int f();\n", "never built"),
    ("forgotten test", "tests/values/other_test.cpp", "int f();\n", "never built"),
    ("idle exemption", "cli/it.cpp", "// tidy: long because it was once long\nint f();\n",
     "excuses nothing"),
    ("exemption without a reason", "src/cpu/it.cpp",
     "void f() { g(new int); }  // tidy: allocation because\n", "excuses nothing"),
    ("dead link", "docs/it.md", "See [that](../src/gone.md#top).\n", "link to ../src/gone.md"),
    ("wide python", "tools/it.py", "a = " + "1" * 100 + "\n", "columns"),
]

# What looks like a violation and is none.
INNOCENT = [
    ("words in comments and strings", "src/cpu/it.cpp",
     '// getenv, malloc(, new, m_splits\n/* std::cout\n */\nconst char* const kT = "\\" puts(";\n'
     "constexpr char kQ = '\"';\nconstexpr int kN = 1'000'000;\n"
     'constexpr auto kR = R"(using namespace std; " )";\n'),
    ("excused function", "cli/it.cpp",
     "// tidy: long because the table is one table\nint f() {\n" + LONG_BODY + "}\n"),
    ("excused line", "src/cpu/it.cpp",
     "void f() { g(new int); }  // tidy: allocation because it runs once a process\n"),
    ("line excused by the line above", "src/cpu/it.cpp",
     "// tidy: allocation because it runs once a process\nvoid f() { g(new int); }\n"),
    ("the entry header", "src/cpu/it.cpp", '#include "backend/entry.h"\n'),
    ("tests see everything", "tests/it_test.cpp",
     '#include <gtest/gtest.h>\n\n#include "ops/inner.h"\nusing namespace cadre;\n'),
    ("five parameters", "include/cadre/it.h",
     "int f(std::map<int, std::pair<int, int>> a, int b, int c, int d, int e);\n"),
    ("a kernel of an operator", "torch/csrc/it.cpp",
     "int f(int a, int b, int c, int d, int e, int g);\n"),
    ("macro call", "tests/it_test.cpp", "INSTANTIATE(a, b, c, d, e, f);\n"),
    ("constants", "src/cpu/it.cpp",
     "static constexpr int kA[] = {1};\nconst std::array<const char*, 1> kB = {nullptr};\n"
     "inline constexpr auto kC = [](int a) { static_assert(true); return a; };\n"
     "struct A { int count = 0; };\nusing T = int;\nextern template struct B<int>;\n"
     "enum class E : int { kOne };\nstruct F;\nstruct G final : A { G() : a{1}, b(2) {} };\n"),
    ("longest files", "src/ops/it.h", "int f();\n" * 400),
    ("longest files elsewhere", "cli/it.h", "int f();\n" * 500),
    ("longest function", "cli/it.cpp", "int f() {\n" + "  int x;\n" * 43 + "}\n"),
    ("three template parameters", "src/ops/it.h", "template <class A, int B, bool C>\nstruct S;\n"),
    ("words near a banned phrase", "src/cpu/it.h",
     "// A copy; engines. multiProcessorCount, the DMA engine, a second, cached one.\nint f();\n"),
    ("types with a subject", "torch/csrc/it.cpp", "struct CallArgs {};\nint Call();\n"),
    ("owned to-do", "docs/it.md", f"{TO_DO}(#12): later\n"),
    ("live links", "docs/it.md", "[a](../src/ops/thing.cpp) [b](#top) [c](https://x.y/z)\n"),
    ("path below the root", "docs/it.md", "tests/work/x build/root/x $HOME/work/y\n"),
]


class Planted(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        (self.root / "tools").mkdir()
        shutil.copy(ROOT / "tools/layers.toml", self.root / "tools")
        for path, content in CLEAN.items():
            self.write(path, textwrap.dedent(content))
        for path in ("src/ops/inner.h", "src/backend/entry.h", "src/backend/walk.h"):
            self.write(path, "#pragma once\n")

    def write(self, path, content):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content)

    def test_clean_tree(self):
        self.assertEqual(tidy.findings(self.root), ([], []))

    def test_each_violation_is_found(self):
        for name, path, content, want in PLANTED:
            with self.subTest(name):
                self.setUp()
                self.write(path, content)
                got, _ = tidy.findings(self.root)
                self.assertTrue(any(p == path and want in what for p, _, what in got), got)
                self.assertEqual({p for p, _, _ in got}, {path}, got)

    def test_no_false_alarm(self):
        for name, path, content in INNOCENT:
            with self.subTest(name):
                self.setUp()
                self.write(path, content)
                self.assertEqual(tidy.findings(self.root)[0], [])

    def test_exemptions_are_listed(self):
        self.write("cli/it.cpp", INNOCENT[1][2])
        _, excused = tidy.findings(self.root)
        self.assertEqual(excused, [("cli/it.cpp", 1, "long", "the table is one table")])

    def test_operation_with_a_missing_file(self):
        self.write("include/cadre/thing.h", "#pragma once\nvoid run(int plan, int args);\n")
        stem = {"kind": "operation", "declares": r"\bvoid\s+run\(",
                "rooms": ["src/ops/{}.cpp", "src/cpu/{}.cpp", "tests/**/{}_test.cpp"]}
        got = [what for _, _, what in tidy.check_stems(self.root, stem)]
        self.assertEqual(got, ["operation without src/cpu/thing.cpp; add it",
                               "operation without tests/**/thing_test.cpp; add it"])

    def test_operation_and_layer_by_the_real_list(self):
        self.write("include/cadre/it.h", "#pragma once\nvoid run(const Plan&, Args);\n")
        self.write("include/cadre/that.h", "#pragma once\nvoid forward(const Plan&, Args);\n")
        got = {(path, what) for path, _, what in tidy.findings(self.root)[0]}
        self.assertIn(("include/cadre/it.h", "operation without docs/ops/it.md; add it"), got)
        self.assertIn(("include/cadre/that.h", "layer without src/layers/that.cpp; add it"), got)

    def test_table_of_rooms(self):
        cuda = ["include/cadre", "src/formats", "src/backend/entry.h"]
        rules = {"may_include": {"src/cuda": cuda, "tests": ["*"], "include/cadre": [],
                                 "src/ep": []},
                 "outside": {"cuda": ["src/cuda"], "omp.h": ["src/cpu"]},
                 "libraries": {"cuda": "CUDA", "omp.h": "OpenMP"}}
        rows = ["| `src/cuda/` | kernels | include, formats, `backend/entry.h`, CUDA |",
                "| `include/cadre/` | headers | the standard library |",
                "| `tests/` | tests | everything |", "| `tools/` | tools | |"]

        def found(rows):
            table = ["# A", tidy.ROOMS_HEADER, "|---|---|---|", *rows, "", "end"]
            self.write("ARCHITECTURE.md", "\n".join(table))
            return [(n, what) for _, n, what in tidy.check_rooms_table(self.root, rules)]

        self.write("tests/it.h", "")
        self.assertEqual(found(rows), [])
        self.assertEqual(found([rows[0].replace(", CUDA", ""), *rows[1:]]),
                         [(4, "src/cuda may include 'include, formats, `backend/entry.h`' here and "
                              "'include, formats, `backend/entry.h`, CUDA' in tools/layers.toml")])
        self.assertEqual(found(rows[:2] + rows[3:]),
                         [(1, "the table of rooms lacks tests, which may include everything")])
        self.assertEqual(found([*rows, "| `attic/` | old | include |"]),
                         [(8, "attic may include 'include' here and '' in tools/layers.toml")])
        self.write("ARCHITECTURE.md", "# A\n")
        self.assertIn("no table of rooms",
                      next(tidy.check_rooms_table(self.root, rules))[2])

    def test_line_numbers(self):
        self.write("cli/it.cpp", "/* a\n\n*/ int f();\n\nint g(int, int, int, int,\n int, int);\n")
        got, _ = tidy.findings(self.root)
        self.assertEqual([(p, n) for p, n, _ in got], [("cli/it.cpp", 5)])

    def test_command_line(self):
        self.assertEqual(tidy.main([str(self.root)]), 0)
        self.write("src/cpu/it.cpp", "int global;\n")
        self.assertEqual(tidy.main([str(self.root)]), 1)


class Scan(unittest.TestCase):
    def test_functions(self):
        source = cpp_scan.Source(textwrap.dedent("""\
            namespace a::b {
            template <class T, int N>
              requires(N > 0)
            std::vector<T> make(const std::function<void(int, int)>& f,
                                T (&out)[N]) {
              if (N > 1) { f(1, 2); }
              return {};
            }
            A::A(int x) : x_{x}, y_(x) {}
            A::~A() = default;
            auto late(int a) -> std::pair<int, int> { return {a, a}; }
            std::ostream& operator<<(std::ostream& out, const A& a);
            }
            """))
        got = [(f.name, f.start, f.end, f.parameters, bool(f.body)) for f in source.functions]
        self.assertEqual(got, [("make", 2, 8, 2, True), ("A", 9, 9, 1, True),
                               ("A", 10, 10, 0, False), ("late", 11, 11, 1, True),
                               ("operator", 12, 12, 2, False)])
        self.assertEqual(source.templates, [cpp_scan.Template(2, 2)])


if __name__ == "__main__":
    unittest.main()
