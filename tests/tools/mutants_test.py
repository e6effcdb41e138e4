"""tools/mutants.py on a project of three lines: what it catches, misses and refuses."""
import contextlib
import io
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402
import turn  # noqa: E402

PROJECT = {
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.25)\nproject(tiny LANGUAGES CXX)\n"
                      "add_executable(sum_test sum_test.cpp)\n",
    "sum.h": "inline int sum(int a, int b) { return a + b; }\ninline int unseen() { return 1; }\n",
    "sum_test.cpp": '#include "sum.h"\nint main() { return sum(2, 3) == 5 ? 0 : 1; }\n',
}
SUM = 'name = "{}"\nfile = "sum.h"\ntest = "sum_test"\nold = "{}"\nnew = "{}"\n'
CAUGHT = SUM.format("minus", "a + b", "a - b")


class Mutants(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for name, text in PROJECT.items():
            (self.root / name).write_text(text)
        (self.root / "tools").mkdir()

    def run_on(self, *rows, arguments=()):
        (self.root / "tools/mutants.toml").write_text("".join("[[mutant]]\n" + r for r in rows))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                code = mutants.main([*arguments, str(self.root)])
            except SystemExit as error:
                code, extra = 2, str(error)
                out.write(extra)
        return code, out.getvalue()

    def test_caught_missed_and_broken(self):
        code, text = self.run_on(CAUGHT, SUM.format("idle", "return 1;", "return 2;"),
                                 SUM.format("broken", "int unseen", "Int unseen"),
                                 SUM.format("never", "return 1;", "static_assert(false);"))
        self.assertEqual(code, 1)
        self.assertRegex(text, r"caught  minus .*ended with 1")
        self.assertRegex(text, r"MISSED  idle .*SURVIVED")
        self.assertRegex(text, r"MISSED  broken .*does not compile")
        self.assertRegex(text, r"caught  never .*red while compiling")
        self.assertIn("2 caught, 2 missed", text)
        for name, want in PROJECT.items():
            self.assertEqual((self.root / name).read_text(), want)

    def test_all_caught(self):
        code, text = self.run_on(CAUGHT)
        self.assertEqual((code, "1 caught, 0 missed" in text), (0, True))

    def test_code_that_does_not_run_here(self):
        idle = SUM.format("idle", "return 1;", "return 2;") + 'cpu = "no_such_flag"\n'
        code, text = self.run_on(CAUGHT, idle)
        self.assertEqual(code, 0)
        self.assertRegex(text, r"skipped idle .*this processor is not no_such_flag")
        self.assertIn("1 caught, 0 missed", text)
        info = self.root / "cpuinfo"
        info.write_text("flags : sse avx\n")
        told = {cpu: mutants.runs_on(cpu, info)
                for cpu in ("", "avx", "amx", "!amx", "!avx", "avx !amx", "avx !sse", "amx !avx")}
        self.assertEqual([cpu for cpu, runs in told.items() if runs],
                         ["", "avx", "!amx", "avx !amx"])

    def test_code_whose_test_cannot_be_built_here(self):
        emulated = CAUGHT.replace("minus", "kernel") + "emulated = true\n"
        code, text = self.run_on(CAUGHT, emulated.replace("sum_test", "gone_test"))
        self.assertEqual(code, 0)
        self.assertRegex(text, r"skipped kernel .*no headers of CUDA")
        self.assertIn("1 caught, 0 missed", text)
        self.assertIn("1 caught, 0 missed", self.run_on(emulated)[1])
        code, text = self.run_on(CAUGHT, emulated, arguments=["--cpu"])
        self.assertIn("1 caught, 0 missed", text)

    def test_python_files_of_the_door(self):
        """On a package that is built, whose Python files are in the source. Without pytest."""
        door, built = self.root / "torch/cadre", self.root / "build/x/torch/cadre"
        for folder in (door, built, self.root / "tests/torch"):
            folder.mkdir(parents=True)
        (self.root / "tests/torch/test_sums.py").touch()
        (door / "sums.py").write_text("def sum(a, b): return a + b\ndef unseen(): return 1\n")
        (built / "sums.py").symlink_to(door / "sums.py")
        script = self.root / "tools/python.sh"
        script.write_text("#!/bin/sh\ncase $* in *--version) exit;; esac\n"
                          "exec python3 -c 'import cadre.sums as s; assert s.sum(2, 3) == 5'\n")
        script.chmod(0o755)
        rows = [row.replace("sum.h", "torch/cadre/sums.py").replace("sum_test", "test_sums.py")
                for row in (CAUGHT, SUM.format("idle", "return 1", "return 2"))]
        code, text = self.run_on(*rows)
        self.assertEqual(code, 0)
        self.assertRegex(text, r"skipped minus .*no built package or torch here")
        (built / "libcadre_torch.so").touch()
        code, text = self.run_on(*rows)
        self.assertEqual(code, 1)
        self.assertRegex(text, r"caught  minus .*ended with 1")
        self.assertRegex(text, r"MISSED  idle .*SURVIVED")

    def git(self, *words):
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        subprocess.run(["git", *who, "-C", self.root, *words], check=True, capture_output=True)

    def commit(self, times=1):
        self.git("add", "--all")
        for _ in range(times):
            self.git("commit", "--quiet", "--allow-empty", "--message=x")

    def chosen(self, root=None):
        return {m.name for m in mutants.in_turn(root or self.root, self.rows)}

    def test_in_turn_takes_what_changed_and_a_third_of_the_rest(self):
        self.rows = [mutants.Mutant(str(at), f"{at}.h", "a", "b", f"of_{at}_test")
                     for at in range(9)]
        everything = {m.name for m in self.rows}
        self.assertEqual(self.chosen(), everything)  # no repository
        for mutant in self.rows:
            (self.root / mutant.file).write_text("a")
        self.git("init", "--quiet")
        self.commit(turn.RECENT_COMMITS)
        self.assertEqual(self.chosen(), everything)  # too young to say what changed
        self.commit()
        turns = []
        for _ in range(60):
            self.commit()
            turns.append(self.chosen())
            self.assertEqual(turns[-1], self.chosen())
        self.assertEqual({len(turn) for turn in turns}, {3})
        self.assertEqual(set.union(*turns), everything)

        (self.root / "1.h").write_text("changed")
        (self.root / "of_2_test.cpp").write_text("new")
        self.commit()
        drawn = self.chosen()
        self.assertLess({"1", "2"}, drawn)
        self.assertLessEqual(len(drawn), 5)
        for name in everything:
            (self.root / f"{name}.h").write_text("not even committed")
        self.assertEqual(self.chosen(), everything)

        shallow = self.root / "shallow"
        self.git("clone", "--quiet", "--depth=1", f"file://{self.root}", shallow)
        self.assertEqual(self.chosen(shallow), everything)

    def test_what_there_is_no_time_for_is_left_and_said(self):
        code, text = self.run_on(CAUGHT, arguments=["--seconds", "0"])
        self.assertEqual(code, 0)
        self.assertIn("mutants: 1 left, since 0 s were over\nmutants: 0 caught, 0 missed", text)

    def test_in_turn_runs_them(self):
        code, text = self.run_on(CAUGHT, arguments=["--in-turn"])
        self.assertEqual((code, "1 caught, 0 missed" in text), (0, True))

    def test_warnings_are_no_errors_and_errors_are(self):
        launcher, source = ROOT / "tools/with_warnings.sh", self.root / "sum_test.cpp"

        def compiles(text):
            source.write_text(text)
            words = ["g++", "-Wall", "-Werror", "-fsyntax-only", source]
            return [subprocess.run(before + words, capture_output=True).returncode == 0
                    for before in ([], [launcher])]

        self.assertEqual(compiles("int main() {}"), [True, True])
        self.assertEqual(compiles("int main() { int unused; }"), [False, True])
        self.assertEqual(compiles("int main() { return none; }"), [False, False])

    def test_text_that_is_not_there_once(self):
        for old, count in (("a * b", 0), ("inline", 2)):
            code, text = self.run_on(SUM.format("lost", old, "x"), arguments=["--check"])
            self.assertEqual(code, 1)
            self.assertIn(f"stands {count} times in sum.h", text)
        code, text = self.run_on(CAUGHT.replace("sum.h", "gone.h"), arguments=["--check"])
        self.assertEqual((code, "gone.h does not exist" in text), (1, True))
        self.assertEqual(self.run_on(SUM.format("same", "a + b", "a + b"))[0], 1)

    def test_what_no_test_can_see(self):
        for test in ("sums", "torch_sums", "test_sums.py"):
            code, text = self.run_on(CAUGHT.replace("sum_test", test), arguments=["--check"])
            self.assertEqual(code, 1)
            self.assertIn(f"{test} is neither a *_test nor in tests/torch", text)
        door = self.root / "torch/csrc"
        door.mkdir(parents=True)
        (self.root / "sum.h").rename(door / "sum.h")
        code, text = self.run_on(CAUGHT.replace("sum.h", "torch/csrc/sum.h"), arguments=["--check"])
        self.assertEqual(code, 1)
        self.assertIn("minus: no copy builds the C++ of the package", text)

    def test_red_before_any_fault(self):
        (self.root / "sum_test.cpp").write_text("int main() { return 1; }\n")
        code, text = self.run_on(CAUGHT)
        self.assertEqual(code, 2)
        self.assertIn("must run and pass without a mutant", text)

    def test_two_of_one_name(self):
        code, text = self.run_on(CAUGHT, CAUGHT)
        self.assertEqual((code, "same name" in text), (2, True))


if __name__ == "__main__":
    unittest.main()
